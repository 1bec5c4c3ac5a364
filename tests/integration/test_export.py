"""`python -m train.export` on the run of a tiny config: what it writes is what the run has saved, bit by bit."""

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import kljax
from tests.integration.command import LORA, PPO, files, saved_arrays, state_arrays
from train.data.tokenizers import load_tokenizer
from train.export import _warn_of_ends, main
from train.models import Decoder
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.run.saved_run import SavedRun, fitting
from train.run.setup import config_mesh
from train.weights.huggingface import load_params
from train.weights.huggingface.config import decoder_config
from train.weights.model import make_model
from train.weights.peft import check_adapter, read_peft_config

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def lora(shared):
    return shared(*LORA).succeeded().root


@pytest.fixture(scope="module")
def full(shared):
    return shared(*PPO).succeeded().root


@pytest.fixture
def export(tmp_path, capsys):
    """`export(run, *flags)`: the folder that was written, or the message that was printed."""

    def call(run, *flags):
        folder = tmp_path / "exports" / "out"
        code = main([str(run), "--to", str(folder), *flags])
        printed = capsys.readouterr()
        assert bool(printed.err) == (code != 0)
        assert folder.is_dir() or code
        return folder if code == 0 else printed.err

    return call


def built(run):
    saved = SavedRun.at(run)
    return saved, make_model(saved.config, load_tokenizer(saved.config)), config_mesh(fitting(saved.config))


def adapter_of(run, step):
    prefix = "trainable.adapter."
    return {name.removeprefix(prefix): x for name, x in state_arrays(run, step).items() if name.startswith(prefix)}


def test_an_adapter_becomes_a_peft_folder(lora, export):
    before = files(lora)
    folder = export(lora, "--base", "somebody/base")
    saved, model, _ = built(lora)
    check_adapter(folder, model)
    assert read_peft_config(folder) == model.config.lora
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "somebody/base"
    stored, expected = load_file(folder / "adapter_model.safetensors"), adapter_of(lora, saved.config.steps)
    assert len(stored) == model.config.layers * len(expected)
    for name, values in expected.items():
        for layer, matrix in enumerate(values):
            key = f"base_model.model.model.layers.{layer}.{name.removeprefix('layers.')}.weight"
            np.testing.assert_array_equal(stored[key], matrix.T)
    exported = files(folder)
    assert f"error: --to: {folder} is there already, and nothing is overwritten" in export(lora)
    assert (files(folder), files(lora)) == (exported, before)


def test_orbax_export_is_a_reference_of_another_run(lora, full, export, tmp_path):
    folder = export(lora, "--format", "orbax", "--step", "1")
    for name, values in adapter_of(lora, 1).items():
        np.testing.assert_array_equal(saved_arrays(folder)[name], values)
    folder = folder.rename(tmp_path / "adapter")
    folder = export(lora, "--format", "orbax", "--step", "0", "--merge").rename(tmp_path / "base")
    # The adapter adds nothing yet.
    assert {k: v.tobytes() for k, v in saved_arrays(folder).items()} == {
        k: v.tobytes() for k, v in saved_arrays(lora / "base").items()
    }
    folder = export(full, "--format", "orbax")
    saved, model, mesh = built(full)
    policy = saved.policy(model, mesh, saved.config.steps)
    kljax.check_tree(folder, jax.eval_shape(lambda: policy.params))
    expected = state_arrays(full, saved.config.steps)
    for name, values in saved_arrays(folder).items():
        np.testing.assert_array_equal(values, expected[f"trainable.params.{name}"])


def test_all_weights_may_have_another_dtype(smoke, export):
    message = "error: --dtype: got bfloat16, but only --format hf reads it; the format is orbax"
    assert message in export(smoke.root, "--format", "orbax", "--dtype", "bfloat16")
    folder = export(smoke.root, "--dtype", "bfloat16")
    written = load_file(folder / "model.safetensors")
    assert {str(array.dtype) for array in written.values()} == {"bfloat16"}
    embedding = written["model.embed_tokens.weight"]
    expected = state_arrays(smoke.root, 2)["trainable.params.embed_tokens.embedding"]
    np.testing.assert_array_equal(embedding, expected.astype(embedding.dtype))


def test_merged_weights_may_have_another_dtype(lora, export):
    message = "error: --dtype: got bfloat16, but only --format hf reads it; the format is peft"
    assert message in export(lora, "--dtype", "bfloat16")
    folder = export(lora, "--merge", "--dtype", "bfloat16", "--step", "0")
    assert {str(array.dtype) for array in load_file(folder / "model.safetensors").values()} == {"bfloat16"}


def test_merged_weights_become_a_folder_of_hugging_face(lora, export):
    """A folder that is read back has the log-probs of base and adapter, whatever is left of the run by then."""
    folder = export(lora, "--merge")
    saved, model, mesh = built(lora)
    full = Decoder(decoder_config(folder))
    assert full.config == dataclasses.replace(model.config, lora=None)
    tokens, mask = jax.random.randint(jax.random.key(0), (2, 9), 0, 256), np.ones((2, 9), bool)
    stats = jax.jit(functools.partial(token_stats, temperature=1.0))
    expected = stats(ScoredPolicy(model, saved.policy(model, mesh, saved.config.steps)), Sequences.rows(tokens, mask))[
        0
    ].log_prob
    got = stats(ScoredPolicy(full, kljax.Policy(load_params(folder, full, mesh))), Sequences.rows(tokens, mask))[
        0
    ].log_prob
    base = stats(ScoredPolicy(model, saved.policy(model, mesh, 0)), Sequences.rows(tokens, mask))[0].log_prob
    np.testing.assert_allclose(got, expected, rtol=0, atol=5e-6)
    assert np.abs(expected - base).max() > 1e-4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step", "7"], "error: --step: got 7, but the run RUN has steps 0, 1, 2"),
        (
            ["--format", "hf"],
            "error: --format: got hf, which holds whole weights, but the run trains an adapter; add --m",
        ),
        (["--format", "peft", "--merge"], "error: --format: got peft, but merged weights are no adapter"),
    ],
)
def test_contradicting_export_options_are_named(lora, export, flags, message):
    assert message.replace("RUN", str(lora)) in export(lora, *flags)


def test_export_without_run_or_adapter_is_named(full, lora, export, tmp_path):
    assert "error: --merge: the run has no adapter" in export(full, "--merge")
    assert "error: --format: got peft, but the run has no adapter" in export(full, "--format", "peft")
    assert f"error: {tmp_path} is not the directory of a run: it has no config.yaml" in export(tmp_path)
    (tmp_path / "config.yaml").write_bytes((lora / "config.yaml").read_bytes())
    assert f"error: --step: the run {tmp_path} has no checkpoint yet" in export(tmp_path)


def test_adapter_without_ends_of_its_base_warns(capsys):
    base = str(GOLDENS / "models" / "qwen3")
    _warn_of_ends(SimpleNamespace(eos_ids=(2,)), base)
    _warn_of_ends(SimpleNamespace(eos_ids=(9,)), None)
    assert capsys.readouterr().err == ""
    _warn_of_ends(SimpleNamespace(eos_ids=(9, 2, 7)), base)
    error = capsys.readouterr().err
    assert f"generation_config.json, and that of {base} lacks the ids [9, 7]" in error
    assert "pass eos_token_id=[9, 2, 7] to `generate`, or stop_token_ids to vLLM" in error
