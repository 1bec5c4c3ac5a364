"""A base in int8 through the command: trained on, continued, evaluated, exported, and on a mesh."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

import kljax
from tests.integration.command import LORA, assert_same_arrays, records, run_here, saved_arrays, state_arrays
from train.data.tokenizers import load_tokenizer
from train.eval import main as evaluate
from train.export import main as export
from train.models import Decoder
from train.models.int8 import is_int8
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.run.saved_run import SavedRun, fitting
from train.run.setup import config_mesh
from train.weights.huggingface import load_params
from train.weights.huggingface.config import decoder_config
from train.weights.model import make_model

INT8 = (*LORA, "model.quantization=int8")
STEPS = 2


@pytest.fixture(scope="module")
def run(shared):
    return shared(*INT8).succeeded().root


def policy_of(root, step):
    saved = SavedRun.at(root)
    model, mesh = make_model(saved.config, load_tokenizer(saved.config)), config_mesh(fitting(saved.config))
    return model, mesh, saved.policy(model, mesh, step)


def test_adapter_trains_and_int8_base_stays_the_same(run, shared):
    _, _, policy = policy_of(run, STEPS)
    layer_leaves = jax.tree.leaves(policy.params["layers"], is_leaf=is_int8)
    assert sum(map(is_int8, layer_leaves)) == 7
    plain = shared(*LORA).succeeded().root
    assert_same_arrays(saved_arrays(run / "base"), saved_arrays(plain / "base"))
    before, after = (state_arrays(run, step) for step in (0, STEPS))
    adapter = [name for name in before if name.startswith("trainable.adapter.")]
    assert adapter
    assert [name for name in before if name.startswith("trainable.") and name not in adapter] == []
    assert [name for name in adapter if np.array_equal(before[name], after[name])] == []
    kls = [record["kl_reference"] for record in records(run, "train")]
    assert 0 <= kls[0] < 1e-12
    assert kls[1] > 1e-9
    # The rounding of the weights is in what is trained: not the run of the weights before it.
    losses = [[record["entropy"] for record in records(root, "train")] for root in (run, plain)]
    assert losses[0] != losses[1]


@pytest.mark.thorough
def test_run_resumes_bit_by_bit(run, tmp_path):
    first = run_here(*INT8, "steps=1", f"output={tmp_path}").succeeded().root
    run_here(*INT8, f"output={tmp_path}", "--resume").succeeded()
    assert_same_arrays(state_arrays(first, STEPS), state_arrays(run, STEPS))
    for phase in ("train", "eval"):
        assert records(first, phase) == records(run, phase)


def test_resume_with_another_quantization_is_refused(run):
    again = run_here(*LORA, f"output={run.parent}", "--resume")
    assert again.returncode == 2
    assert "model.quantization: the run has 'int8', got None" in again.stderr


def test_a_step_is_evaluated_as_the_run_did(run, capsys, tmp_path):
    file = tmp_path / "found.json"
    assert evaluate([str(run), "--step", "1", "--json", str(file)]) == 0
    recorded, record = json.loads(file.read_text()), records(run, "eval")[1]
    assert record["step"] == 1
    assert recorded["sampled"]["accuracy"] == record["accuracy"]
    assert recorded["greedy"]["accuracy"] == record["accuracy_greedy"]
    assert all(record[name] == value for name, value in recorded["sampled"].items() if name in record)


def test_config_starting_from_the_saved_base_is_evaluated(run, capsys, tmp_path):
    file = tmp_path / "found.json"
    assert evaluate([*INT8, f"warm_start.checkpoint={run / 'base'}", "--json", str(file)]) == 0
    recorded, record = json.loads(file.read_text()), records(run, "eval")[0]
    assert recorded["sampled"] == {name: record[name] for name in recorded["sampled"]}


def test_export_has_the_log_probs_of_the_run(run, capsys, tmp_path):
    model, mesh, policy = policy_of(run, STEPS)
    tokens, mask = jax.random.randint(jax.random.key(0), (2, 9), 0, 256), np.ones((2, 9), bool)
    stats = jax.jit(functools.partial(token_stats, temperature=1.0))
    expected = stats(ScoredPolicy(model, policy), Sequences.rows(tokens, mask))[0].log_prob
    folder = tmp_path / "merged"
    assert export([str(run), "--to", str(folder), "--merge"]) == 0
    assert "The base was held in int8: these are the weights that it stands for" in capsys.readouterr().out
    full = Decoder(decoder_config(folder))
    assert full.config == dataclasses.replace(model.config, lora=None, quantization=None)
    got = stats(ScoredPolicy(full, kljax.Policy(load_params(folder, full, mesh))), Sequences.rows(tokens, mask))[
        0
    ].log_prob
    np.testing.assert_allclose(got, expected, rtol=0, atol=5e-6)
    assert export([str(run), "--to", str(tmp_path / "adapter")]) == 0
    assert "int8" not in capsys.readouterr().out
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


@pytest.mark.thorough
def test_mesh_gives_equal_numbers(run, shared):
    spread = shared(*INT8, "mesh={data: 1, fsdp: 2, tensor: 2}").succeeded().root
    for first, second in zip(records(spread, "train"), records(run, "train"), strict=True):
        for name in ("reward", "completion_length", "finished"):
            assert first[name] == second[name]
        np.testing.assert_allclose([first["entropy"]], [second["entropy"]], rtol=2e-6)
