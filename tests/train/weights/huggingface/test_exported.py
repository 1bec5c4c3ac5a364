"""Recorded exports, and results of transformers and PEFT on them: read here it gives their log-probs, written again
it is the same, so that what they read is what is still written.

The folders are those of `tests/goldens/exports`, which `python -m tests.round_trip --record` made.
"""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

import kljax
from train.models import Decoder
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.weights.huggingface import load_params, save_folder
from train.weights.huggingface.config import decoder_config
from train.weights.peft import base_model, load_adapter, read_peft_config, save_adapter
from train.weights.tensor_digests import FILE_NAME

GOLDENS = Path(__file__).parents[3] / "goldens"
BASE, MERGED, ADAPTER = GOLDENS / "models" / "qwen3", GOLDENS / "exports" / "merged", GOLDENS / "exports" / "adapter"
TOLERANCE = 5e-6


@functools.cache
def recorded() -> dict[str, np.ndarray]:
    """Returns the results of transformers."""
    with np.load(GOLDENS / "exports" / "expected.npz") as file:
        return dict(file)


@functools.cache
def loaded(name: str) -> tuple[Decoder, kljax.Policy]:
    """The policy that a folder holds: `merged`, or the base with `adapter` on it."""
    mesh = make_mesh()
    if name == "merged":
        model = Decoder(decoder_config(MERGED))
        return model, kljax.Policy(load_params(MERGED, model, mesh))
    model = Decoder(decoder_config(BASE, lora=read_peft_config(ADAPTER)))
    return model, kljax.Policy(load_params(BASE, model, mesh), load_adapter(ADAPTER, model, mesh))


def tensors(folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    """The dtype, as the file calls it, and the values of every tensor of the one file of a folder."""
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        return {name: (file.get_slice(name).get_dtype(), file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def others(folder: Path) -> dict[str, bytes]:
    """Every file but the weights and their digests: those of the tokenizer and the config."""
    paths = [path for path in folder.iterdir() if path.suffix != ".safetensors" and path.name != FILE_NAME]
    return {path.name: path.read_bytes() for path in paths}


def assert_same_bytes(got: Path, want: Path) -> None:
    assert others(got) == others(want)
    actual, expected = tensors(got), tensors(want)
    assert actual.keys() == expected.keys()
    for name, (dtype, array) in expected.items():
        assert (actual[name][0], actual[name][1].shape) == (dtype, array.shape), name
        assert actual[name][1].tobytes() == array.tobytes(), name


def save(name: str, path: Path) -> None:
    """Exports what `loaded` read as `train.export` does."""
    model, policy = loaded(name)
    if name == "merged":
        save_folder(path, model, policy, source=BASE)
    else:
        save_adapter(path, model, policy.adapter, base_name=base_model(ADAPTER), source=BASE)


@pytest.mark.parametrize("name", ["merged", "adapter"])
def test_exported_log_probs_match_transformers(name):
    model, policy = loaded(name)
    tokens = recorded()["tokens"]
    stats, _ = jax.jit(
        lambda policy: token_stats(ScoredPolicy(model, policy), Sequences.rows(tokens, tokens >= 0), temperature=1.0)
    )(policy)
    np.testing.assert_allclose(stats.log_prob, recorded()[name], rtol=0, atol=TOLERANCE)
    assert np.abs(recorded()[name] - recorded()["before"]).max() > 0.1, "training moved what is compared"


@pytest.mark.parametrize(("name", "folder"), [("merged", MERGED), ("adapter", ADAPTER)])
def test_repeated_export_gives_the_same_files(tmp_path, name, folder):
    save(name, tmp_path / "out")
    assert_same_bytes(tmp_path / "out", folder)


def test_base_with_its_adapter_is_exported_merged(tmp_path):
    save_folder(tmp_path / "out", *loaded("adapter"), source=BASE)
    assert others(tmp_path / "out") == others(MERGED)
    actual, expected = tensors(tmp_path / "out"), tensors(MERGED)
    assert actual.keys() == expected.keys()
    targets = json.loads((ADAPTER / "adapter_config.json").read_text())["target_modules"]
    for name, (dtype, array) in expected.items():
        assert (actual[name][0], actual[name][1].shape) == (dtype, array.shape), name
        if name.split(".")[-2] not in targets:
            assert actual[name][1].tobytes() == array.tobytes(), name
        # A product of the two matrices is summed in another order on another machine: some units in the last place.
        np.testing.assert_allclose(actual[name][1], array, rtol=0, atol=2.0**-22 * np.abs(array).max(), err_msg=name)
