"""The model section: a folder, a preset or a shape; dtypes; what is refused."""

import json
from pathlib import Path

import pytest
import yaml

from tests.train.config.built import build, problems
from train.config.errors import UserError
from train.config.load import dump_yaml, parse
from train.data.tokenizers import ByteTokenizer
from train.weights.model import make_model
from train.weights.peft import read_peft_config

FOLDER = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture
def folder(tmp_path):
    """A folder with nothing but its `config.json`."""

    def make(**change):
        (tmp_path / "config.json").write_text(json.dumps({**FOLDER, **change}))
        return str(tmp_path)

    return make


def test_tiny_replaces_the_section_without_warm_start():
    config, _ = build("model=tiny", model={"path": "/nowhere"})
    assert config.model.path is None
    assert config.warm_start.steps == 0
    assert build("model=tiny", "model.dtype=bfloat16")[0].warm_start.steps == 0
    assert build("model=tiny", "warm_start.steps=7")[0].warm_start.steps == 7
    model = make_model(config, ByteTokenizer())
    assert (model.config.qk_norm, model.config.layers, model.config.vocab_size) == (True, 2, 264)
    assert model.config.rope.theta == 1e6
    assert parse(yaml.safe_load(dump_yaml(config)))[0] == config


def test_a_folder_decides_the_shape(folder):
    config, _ = build(f"model.path={folder()}", "model.dtype=bfloat16", "lora={rank: 2}", "model.attention=xla")
    assert config.warm_start.steps == 0
    assert set(config.model.model_dump()) == {
        "path",
        "revision",
        "dtype",
        "param_dtype",
        "quantization",
        "attention",
        "remat",
        "allow_nonfinite",
        "freeze_pad_embedding",
    }
    assert parse(yaml.safe_load(dump_yaml(config)))[0] == config
    decoder = make_model(config, ByteTokenizer()).config
    assert (decoder.layers, decoder.vocab_size, decoder.dtype, decoder.lora.rank) == (3, 300, "bfloat16", 2)
    assert decoder.attention == "xla"
    assert problems(f"model.path={folder()}", "model.layers=3") == [
        "model.layers: got 3, but config.json of model.path decides it; set only one of them"
    ]
    assert problems("model=tiny", f"model.path={folder()}") == [
        f"model.path: got '{folder()}' and model=tiny, which is a shape in place of a folder; set only one of them"
    ]
    assert problems(f"model={{path: {folder()}, layers: 3, heads: 2}}") == [
        f"model.path: got '{folder()}', whose config.json decides the shape, and layers=3, heads=2; "
        "set only one of them"
    ]


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({}, ("mesh.tensor=4",), r"kv_heads: got 2, expected a multiple of mesh\.tensor = 4"),
        ({}, ("mesh.fsdp=3", "eval.batch_size=3", "warm_start.batch_size=3"), r"width: got 16.* mesh\.fsdp = 3"),
        (
            {},
            ("mesh.expert=2",),
            r"experts: got null, but mesh\.expert = 2 splits experts; set mesh\.fsdp or mesh\.data",
        ),
        ({"vocab_size": 200}, (), "vocab_size: got 200, but the tokenizer has 264 tokens"),
        ({"new_trick": 1}, (), "new_trick: not understood in a config of qwen3"),
    ],
)
def test_mismatched_folder_is_named(folder, change, overrides, message):
    overrides = (*overrides, "rollout.prompts_per_step=3") if "mesh.fsdp=3" in overrides else overrides
    config, _ = build(f"model.path={folder(**change)}", *overrides)
    with pytest.raises(UserError, match=message):
        make_model(config, ByteTokenizer())


def test_a_missing_folder_is_named():
    with pytest.raises(UserError, match=r"model\.path /nowhere"):
        make_model(build("model.path=/nowhere")[0], ByteTokenizer())


def test_sizes_not_divisible_by_the_mesh_are_named():
    assert problems("model.heads=6", "model.kv_heads=3", "mesh.tensor=2") == [
        "model.kv_heads: got 3, expected a multiple of mesh.tensor = 2"
    ]
    assert problems("model.heads=3") == ["model.heads: got 3, expected a multiple of model.kv_heads = 2"]


def test_trained_weights_are_not_held_in_bfloat16():
    (problem,) = problems("model.param_dtype=bfloat16", "warm_start.steps=0")
    assert problem.startswith("model.param_dtype: got bfloat16, but the weights are trained")
    (problem,) = problems("model.param_dtype=bfloat16", "lora={}")
    assert "warm_start.steps = 300 trains the weights" in problem
    assert build("model=tiny", "model.param_dtype=bfloat16", "lora={}")[0].model.param_dtype == "bfloat16"
    # Weights that a checkpoint has in place of a warm start are not trained.
    (problem,) = problems("model.param_dtype=bfloat16", "lora={}", "warm_start.checkpoint=/runs/warm")
    assert problem.startswith("warm_start.checkpoint: got '/runs/warm', expected a saved checkpoint")


def test_unknown_preset_lists_the_known_presets():
    (problem,) = problems("model=tinny")
    assert problem.startswith("model: got 'tinny', expected a mapping with path")
    assert problem.endswith("or one of tiny")


def test_only_a_base_under_an_adapter_is_quantised(folder):
    (problem,) = problems("model.quantization=int8")
    assert problem == (
        "model.quantization: got int8, but there is no lora section, so the weights are trained, and int8 "
        "weights cannot be; set it to null, or add a lora section"
    )
    config, _ = build("model.quantization=int8", "lora={}")
    assert parse(yaml.safe_load(dump_yaml(config)))[0] == config
    assert make_model(config, ByteTokenizer()).config.quantization == "int8"
    config, _ = build(f"model.path={folder()}", "model.quantization=int8", "lora={}")
    assert make_model(config, ByteTokenizer()).config.quantization == "int8"
    assert make_model(build("lora={}")[0], ByteTokenizer()).config.quantization is None


def test_an_adapter_brings_its_rank_alpha_and_targets(tmp_path):
    adapter = Path(__file__).parents[2] / "goldens" / "models" / "gemma3" / "adapter"
    actual = read_peft_config(adapter)
    lora = build(f"lora={{path: {adapter}}}")[0].lora
    assert (lora.rank, lora.alpha, lora.rslora, lora.targets) == (
        actual.rank,
        actual.alpha,
        actual.rslora,
        actual.targets,
    )
    assert actual.rslora
    assert build(f"lora.path={adapter}")[0].lora == lora
    assert build(f"lora={{path: {adapter}, rank: 7}}")[0].lora == lora.model_copy(update={"rank": 7})
    # What cannot be read is named by the check of the adapter.
    for text in ("{}", "[", '{"r": 3}'):
        (tmp_path / "adapter_config.json").write_text(text)
        assert build(f"lora={{path: {tmp_path}}}")[0].lora.rank == 8
    assert build("lora={path: /nowhere}")[0].lora.targets == ("q_proj", "k_proj", "v_proj", "o_proj")


def test_a_path_may_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config, _ = build("model.path=~/models/a", "output=~/runs")
    assert (config.model.path, config.output) == ("/home/somebody/models/a", "/home/somebody/runs")
    (problem,) = problems("reference={source: checkpoint, path: ~/b}", "output=~/runs")
    assert problem.startswith("reference.path: got '/home/somebody/b', expected a saved checkpoint")


def test_nf4_is_refused_with_the_reason():
    (problem,) = problems("model.quantization=nf4", "lora={}")
    assert problem.startswith("model.quantization: got 'nf4', expected int8 or null (nf4 is not there: its logits mo")
