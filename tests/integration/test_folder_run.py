"""A Hugging Face folder in, steps of RL on an adapter, a Hugging Face folder out: the same log-probs."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import kljax
from tests.integration.command import assert_same_arrays, state_arrays
from train.config.errors import UserError
from train.config.load import load
from train.data.tokenizers import load_tokenizer
from train.export import export
from train.models import Decoder
from train.models.parameters import init_params
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.run.run import run
from train.run.saved_run import SavedRun
from train.weights.files import read_record
from train.weights.huggingface import folder_digest, load_params, save_folder
from train.weights.huggingface.config import decoder_config
from train.weights.model import make_model

pytestmark = pytest.mark.slow
GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
GOLDEN = GOLDENS / "qwen3"
CONFIG = """
steps: 2
output: {output}
model: {{path: {folder}}}
lora: {{rank: 2, alpha: 8.0, targets: [q_proj, o_proj, up_proj]}}
data: {{max_operand: 9, max_prompt_length: 64, max_completion_length: 6}}
rollout: {{prompts_per_step: 2, samples_per_prompt: 2}}
loss: {{entropy_coef: 1.0}}
kl: {{loss: {{coef: 0.01, estimator: k2}}}}
optim: {{learning_rate: 1e-2}}
eval: {{every: 2, prompts: 4, batch_size: 4, greedy: false}}
checkpoint: {{every: 2}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path, Path]:
    """The config file, the run directory and the folder that it started from, which a test may change and put back."""
    directory = tmp_path_factory.mktemp("folder")
    folder = directory / "tiny"
    # One layer, as the programs of a sampler grow with them.
    model = Decoder(dataclasses.replace(decoder_config(GOLDEN), layers=1))
    policy = kljax.Policy(init_params(model, jax.random.key(0), make_mesh()))
    save_folder(folder, model, policy, source=GOLDEN, max_file_bytes=50_000)
    config = directory / "config.yaml"
    config.write_text(CONFIG.format(output=directory / "runs", folder=folder))
    assert run(load(config)) == 0
    return config, directory / "runs" / "run", folder


def log_probs(config_path: Path, overrides: list[str], *policies_of) -> list[np.ndarray]:
    """Computes log-probs of one batch under each policy of the model that a config describes."""
    config, mesh = load(config_path, overrides).config, make_mesh()
    model = make_model(config, load_tokenizer(config))
    tokens = np.random.default_rng(0).integers(0, 320, (2, 12)).astype(np.int32)
    score = jax.jit(
        lambda policy: (
            token_stats(ScoredPolicy(model, policy), Sequences.rows(tokens, tokens >= 0), temperature=1.0)[0].log_prob
        )
    )
    return [np.asarray(score(policy_of(model, mesh))) for policy_of in policies_of]


def test_trained_weights_are_exported_with_equal_log_probs(trained, tmp_path):
    config, root, folder = trained
    export(root, tmp_path / "out", step=2, form="hf", merge=True)
    (adapted,) = log_probs(config, [], lambda model, mesh: SavedRun.at(root).policy(model, mesh, 2))
    base, merged = log_probs(
        config,
        [f"model.path={tmp_path / 'out'}", "lora=null"],
        lambda model, mesh: kljax.Policy(load_params(folder, model, mesh)),
        lambda model, mesh: kljax.Policy(load_params(tmp_path / "out", model, mesh)),
    )
    assert np.abs(merged - adapted).max() < 5e-6
    assert np.abs(base - adapted).max() > 1e-3
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_adapter_run_records_its_folder_without_copying(trained):
    _, root, folder = trained
    record = read_record(root / "base.json", "")
    assert record.keys() == {"folder", "digest", "run"}
    assert (record["folder"], record["digest"]) == (str(folder), folder_digest(folder))
    assert not (root / "base").exists()
    assert sum(path.stat().st_size for path in (root / "checkpoints").rglob("*")) < 200_000


def test_the_first_kl_to_the_base_is_zero(trained):
    _, root, _ = trained
    lines = map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
    kls = [line["kl_reference"] for line in lines if line["phase"] == "train"]
    assert 0 <= kls[0] < 1e-12
    assert kls[1] > 1e-9


def test_it_is_continued_with_the_same_weights_only(trained):
    config, root, folder = trained
    assert run(load(config), resume=True) == 0
    path = max(folder.glob("*.safetensors"))
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match=rf"model\.path: {folder} is not what {root} began with.*sha256:"):
            run(load(config), resume=True)
        path.unlink()
        with pytest.raises(UserError, match=rf"model\.path: .*not there: {path.name}"):
            run(load(config), resume=True)
    finally:
        path.write_bytes(content)


@pytest.mark.thorough
def test_int8_base_is_read_again_from_the_folder(trained, tmp_path):
    config, other, folder = trained
    overrides = ["model.quantization=int8", f"output={tmp_path}", "checkpoint.every=1"]
    assert run(load(config, [*overrides, "steps=1"])) == 0
    assert run(load(config, overrides), resume=True) == 0
    root = tmp_path / "run"
    assert read_record(root / "base.json", "") == {"folder": str(folder), "digest": folder_digest(folder)}
    assert not (root / "base").exists()
    first, second = (
        [
            line
            for line in map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
            if line["phase"] == "train"
        ]
        for path in (root, other)
    )
    assert 0 <= first[0]["kl_reference"] < 1e-12 < first[1]["kl_reference"]
    assert first[0]["entropy"] != second[0]["entropy"]
    saved = SavedRun.at(root)
    model = make_model(saved.config, load_tokenizer(saved.config))
    assert saved.policy(model, make_mesh(), 2).params["layers"]["mlp"]["up_proj"]["kernel"]["qvalue"].dtype == "int8"


def test_mismatched_folder_fails_before_the_run_directory_exists(trained, tmp_path):
    config, _, folder = trained
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    shape = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(shape | {"intermediate_size": 64}))
    with pytest.raises(UserError, match=r"model\.path: .*mlp\.down_proj\.weight: got \[32, 48\], expected \[32, 64\]"):
        run(load(config, [f"model.path={other}", f"output={tmp_path / 'runs'}"]))
    assert not (tmp_path / "runs").exists()


GPT_OSS = {
    "adapter on int8": ("lora={rank: 2, alpha: 8.0, targets: [q_proj, up_proj, gate]}", "model.quantization=int8"),
    "all weights": ("lora=null", "optim.host_memory=true", "reference={source: ema, decay: 0.9}"),
}


@pytest.mark.parametrize("name", [pytest.param("adapter on int8", marks=pytest.mark.thorough), "all weights"])
def test_gpt_oss_resumes_and_exports_equal_weights(trained, tmp_path, name):
    """Sinks and biases of experts included: a base in int8 with adapters, an EMA, and moments in the host's memory."""
    config, _, tokenizer = trained
    raw = json.loads((GOLDENS / "gpt_oss" / "config.json").read_text())
    shape = dataclasses.replace(decoder_config(raw | {"vocab_size": 320}), layers=1)
    model, folder, root = Decoder(shape), tmp_path / "tiny", tmp_path / "run"
    policy = kljax.Policy(init_params(model, jax.random.key(0), make_mesh()))
    save_folder(folder, model, policy)
    for path in tokenizer.glob("*token*"):
        shutil.copy(path, folder)
    options = (f"model.path={folder}", f"output={tmp_path}", "checkpoint.every=1", *GPT_OSS[name])
    assert run(load(config, options)) == 0
    states, metrics = [state_arrays(root, step) for step in range(3)], (root / "metrics.jsonl").read_bytes()
    changed = [
        array for array in states[0] if array.startswith("trainable.") and (states[1][array] != states[2][array]).any()
    ]
    assert any(("sinks" if name == "all weights" else "experts.up_proj.lora_B") in array for array in changed)
    shutil.rmtree(root / "checkpoints" / "2")
    assert run(load(config, options), resume=True) == 0
    assert_same_arrays(state_arrays(root, 2), states[2])
    assert (root / "metrics.jsonl").read_bytes() == metrics
    export(root, tmp_path / "out", step=2, form="hf", merge="adapter" in name)
    (expected,) = log_probs(config, options, lambda model, mesh: SavedRun.at(root).policy(model, mesh, 2))
    plain = (f"model.path={tmp_path / 'out'}", "lora=null")
    got, base = log_probs(
        config,
        plain,
        lambda model, mesh: kljax.Policy(load_params(tmp_path / "out", model, mesh)),
        lambda model, mesh: kljax.Policy(load_params(folder, model, mesh)),
    )
    assert np.abs(got - expected).max() < 5e-6
    assert np.abs(base - expected).max() > 1e-3
