"""Folders that are written: the bytes that were read, an adapter merged into them, whole or not at all."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import kljax
from train.data.tasks import Example
from train.data.tokenizers import ByteTokenizer
from train.data.tokenizers.files import load_folder
from train.models import Decoder, DecoderConfig
from train.models.head import head
from train.models.parameters import init_params
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, hidden_states
from train.sequences.batch import move_columns
from train.weights.huggingface import load_params, save, save_folder
from train.weights.huggingface.config import decoder_config
from train.weights.huggingface.save import missing_ends
from train.weights.peft import load_adapter, read_peft_config

GOLDENS = Path(__file__).parents[3] / "goldens" / "models"


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}


@functools.cache
def loaded(family: str, shape: tuple[int, int, int] = (1, 1, 1)) -> tuple[Decoder, kljax.Policy]:
    model = Decoder(decoder_config(GOLDENS / family))
    return model, kljax.Policy(load_params(GOLDENS / family, model, make_mesh(*shape)))


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("qwen3", (2, 2, 2)),
        ("gemma2", (1, 1, 1)),
        ("qwen2_moe", (1, 2, 2)),
        ("mixtral", (1, 1, 1)),
        ("gpt_oss", (1, 2, 2)),
    ],
)
def test_loaded_folder_is_saved_bit_by_bit(tmp_path, family, shape):
    model, policy = loaded(family, shape)
    save_folder(tmp_path / "out", model, policy, source=GOLDENS / family)
    assert_same(weights(tmp_path / "out"), weights(GOLDENS / family))
    assert decoder_config(tmp_path / "out") == model.config
    config, before = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", GOLDENS / family)
    )
    assert config == before
    beside = {path.name for path in (GOLDENS / family).iterdir() if path.is_file()} - {"expected.npz", "config.json"}
    for name in (name for name in beside if "safetensors" not in name):
        assert (tmp_path / "out" / name).read_bytes() == (GOLDENS / family / name).read_bytes()


def test_files_stay_below_the_limit_with_an_index(tmp_path):
    model, policy = loaded("qwen3", (2, 2, 2))
    save_folder(tmp_path / "out", model, policy, source=GOLDENS / "qwen3", max_file_bytes=50_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in weights(GOLDENS / "qwen3").values())
    for path in files:
        with safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            assert sum(file.get_tensor(name).nbytes for name in file.keys()) <= 50_000  # noqa: SIM118
            assert {name for name, where in index["weight_map"].items() if where == path.name} == set(file.keys())
    reloaded = load_params(tmp_path / "out", model, make_mesh())
    jax.tree.map(np.testing.assert_array_equal, reloaded, jax.device_get(policy.params))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_merged_adapter_gives_the_logits_of_peft(tmp_path, family):
    folder, mesh = GOLDENS / family, make_mesh()
    adapted = Decoder(decoder_config(folder, lora=read_peft_config(folder / "adapter")))
    model, policy = loaded(family)
    with_adapter = kljax.Policy(policy.params, load_adapter(folder / "adapter", adapted, mesh))
    save_folder(tmp_path / "out", adapted, with_adapter, source=folder)
    changed = {name for name, array in weights(tmp_path / "out").items() if (array != weights(folder)[name]).any()}
    assert {name.split(".")[-2] for name in changed} == set(adapted.config.lora.targets)
    with np.load(folder / "expected.npz") as expected:
        begins = expected["mask"].argmax(1)
        names = ("tokens", "mask", "adapter/merged")
        tokens, mask, want = (move_columns(expected[name], begins, expected["mask"].shape[1]) for name in names)
    saved = load_params(tmp_path / "out", model, mesh)
    hidden = jax.jit(hidden_states)(ScoredPolicy(model, kljax.Policy(saved)), Sequences.rows(tokens, mask))
    logits = np.where(mask[..., None], hidden @ head(model, saved), 0)
    assert np.abs(logits - want).max() < 5e-6


def test_small_adapter_vanishes_in_bfloat16_not_float32(tmp_path):
    """Also where the base is bfloat16: the sum of base and adapter is rounded once, to the dtype of the files."""
    folder, mesh = GOLDENS / "qwen3", make_mesh()
    lora = read_peft_config(folder / "adapter")
    adapted = Decoder(decoder_config(folder, lora=lora, param_dtype="bfloat16"))
    base = load_params(folder, Decoder(dataclasses.replace(adapted.config, lora=None)), mesh)
    adapter = load_adapter(folder / "adapter", adapted, mesh)
    errors = {}
    for size in (1.0, 1e-4):
        small = jax.tree.map(lambda x, size=size: size**0.5 * x, adapter)
        for dtype in ("bfloat16", "float32"):
            out = tmp_path / f"{size}-{dtype}"
            errors[size, dtype] = save_folder(out, adapted, kljax.Policy(base, small), source=folder, dtype=dtype)
        name, modules = "model.layers.1.self_attn.q_proj.weight", small["layers"]["self_attn"]["q_proj"]
        update = lora.scale * (modules["lora_A"][1] @ modules["lora_B"][1]).T
        kernel = np.asarray(base["layers"]["self_attn"]["q_proj"]["kernel"][1].astype(jnp.float32)).T
        np.testing.assert_allclose(weights(tmp_path / f"{size}-float32")[name], kernel + update, rtol=1e-6, atol=1e-8)
    assert errors[1.0, "float32"] < errors[1e-4, "float32"] < 0.01
    assert errors[1.0, "bfloat16"] < 0.1
    assert errors[1e-4, "bfloat16"] > 0.5
    assert save_folder(tmp_path / "whole", *loaded("qwen3")) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_files_may_have_another_dtype_than_the_parameters(tmp_path, dtype):
    model, policy = loaded("mistral")
    save_folder(tmp_path / "out", model, policy, source=GOLDENS / "mistral", dtype=dtype)
    want = {name: array.astype(jnp.dtype(dtype)) for name, array in weights(GOLDENS / "mistral").items()}
    assert_same(weights(tmp_path / "out"), want)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_model_without_folder_gets_a_complete_config(tmp_path):
    shape = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 24}
    model = Decoder(DecoderConfig(vocab_size=ByteTokenizer().vocab_size, qk_norm=True, tie_embeddings=True, **shape))
    policy = kljax.Policy(init_params(model, jax.random.key(0), make_mesh()))
    save_folder(tmp_path / "out", model, policy, tokenizer=ByteTokenizer())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert (config["eos_token_id"],) == ByteTokenizer().eos_ids
    assert decoder_config(tmp_path / "out") == model.config
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / "out", model, make_mesh()), policy.params)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 2, "top_p": 0.9}, {}, {"eos_token_id": [2, 7, 5], "top_p": 0.9}),
        ({"eos_token_id": [5, 2]}, {}, {"eos_token_id": [5, 2, 7]}),
        ({"eos_token_id": [5, 7, 9]}, {}, {"eos_token_id": [5, 7, 9]}),
        ({"top_k": 3}, {"eos_token_id": 7}, {"top_k": 3, "eos_token_id": [7, 5]}),
        (
            None,
            {"eos_token_id": 5, "bos_token_id": 1},
            {"bos_token_id": 1, "eos_token_id": [5, 7], "pad_token_id": 0},
        ),
        (None, {"eos_token_id": [5, 7]}, None),
    ],
)
def test_export_ends_where_training_did(tmp_path, generation, config, expected):
    model, policy = loaded("qwen3")
    source = tmp_path / "source"
    shutil.copytree(GOLDENS / "qwen3", source)
    source_config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(source_config | {"pad_token_id": 0} | config))
    (source / "generation_config.json").unlink()
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    ends = SimpleNamespace(eos_ids=(7, 5))
    save_folder(tmp_path / "out", model, policy, source=source, tokenizer=ends)
    written = tmp_path / "out" / "generation_config.json"
    assert (json.loads(written.read_text()) if written.exists() else None) == expected
    assert missing_ends(tmp_path / "out", ends.eos_ids) == []


def test_export_of_bytes_has_an_equal_tokenizer(tmp_path):
    """The ids of the run; texts of the special tokens are the tokens in a folder, and bytes in a run."""
    tokenizer, shape = (
        ByteTokenizer(),
        {"layers": 1, "width": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "mlp_width": 8},
    )
    model = Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size, **shape))
    policy = kljax.Policy(init_params(model, jax.random.key(0), make_mesh()))
    save_folder(tmp_path / "out", model, policy, tokenizer=tokenizer)
    read = load_folder(str(tmp_path / "out"), chat=None, system=None, template=None, arguments={})
    rng = np.random.default_rng(0)
    texts = [
        "",
        "1+2=",
        "h\u00e9 \u2603\n\t  x , .",
        "\x00\x7f\xa0\xad\xff",
        "".join(map(chr, rng.integers(1, 0xD7FF, 300))),
    ]
    for text in texts:
        example = Example(text, "", text)
        assert read.prompt_ids(example) == tokenizer.prompt_ids(example)
        assert read.solution_ids(example) == tokenizer.solution_ids(example)
        assert read.decode(tokenizer.solution_ids(example)) == text
    assert (read.bos_id, read.eos_ids, read.pad_id) == (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id)
    assert read.token_bytes()[:256] == tokenizer.token_bytes()[:256]


def test_failed_folder_is_removed_and_nothing_overwritten(tmp_path, monkeypatch):
    model, policy = loaded("gemma2")
    monkeypatch.setattr(save, "write_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        save_folder(tmp_path / "out", model, policy, source=GOLDENS / "gemma2")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        save_folder(tmp_path / "out", model, policy)
    with pytest.raises(ValueError, match="dtype: got int8, expected one of float32, float16, bfloat16"):
        save_folder(tmp_path / "other", model, policy, dtype="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_adapter_of_another_shape_is_an_error(tmp_path):
    model, policy = loaded("qwen3", (2, 2, 2))
    lora = read_peft_config(GOLDENS / "qwen3" / "adapter")
    adapted = Decoder(dataclasses.replace(model.config, lora=lora))
    narrow = {"lora_A": jnp.zeros((3, 32, 4)), "lora_B": jnp.zeros((3, 4, 5))}
    adapter = {"layers": {"self_attn": {"v_proj": narrow}}}
    with pytest.raises(ValueError, match="adapter"):
        save_folder(tmp_path / "out", adapted, kljax.Policy(policy.params, adapter))
    assert list(tmp_path.iterdir()) == []
