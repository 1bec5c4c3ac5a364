"""Runs of a mixture of experts: a bias of the choice is state of the run, and wrong routes end it unharmed."""

import json
import shutil

import numpy as np
import pytest

from tests.integration.command import TINY, assert_same_arrays, files, records, run_here, saved_arrays, state_arrays
from train.config.load import parse
from train.data.tokenizers import ByteTokenizer
from train.export import main as export
from train.models.transformer import Transformer
from train.references.find import find_reference
from train.run.base_weights import load_initial_base
from train.run.saved_run import SavedRun
from train.run.setup import config_mesh
from train.sequences.token_fields import ROUTES
from train.weights.model import make_model

MOE = (
    "configs/moe.yaml",
    *TINY,
    "steps=2",
    "optim={optimizer: adamw, warmup_steps: 0, updates_per_batch: 1}",
    "eval.greedy=false",
    "model={layers: 1, width: 16, heads: 4, kv_heads: 2, head_dim: 8, mlp_width: 32, qk_norm: true}",
    "model.experts={count: 4, active: 2, width: 16}",
    "rollout.prompts_per_step=4",
)
BIASED = (*MOE, "routing.bias_update_rate=0.2")
LEAF = "trainable.params.layers.mlp.choice_bias"


@pytest.fixture(scope="module")
def biased(shared):
    return shared(*BIASED).succeeded().root


def test_sampler_scoring_and_update_use_one_bias(biased):
    """It decides many choices of the second step; a part without it would flip them."""
    first, last = records(biased, "train")
    assert first["router_bias_max"] == pytest.approx(0.2)
    assert set(np.abs(state_arrays(biased, 1)[LEAF]).ravel().tolist()) == {np.float32(0.2)}
    assert last["routing_flips"] < 0.02
    assert last["routing_lost"] == 0


def test_metrics_have_the_tokens_of_each_expert(biased):
    """Every token chooses two of the four experts."""
    first, last = records(biased, "train")
    for record in (first, last):
        tokens = np.array(record["router_tokens_layer_0"])
        assert tokens.shape == (4,)
        assert tokens.sum() % 2 == 0
        mean = tokens.sum() / 4
        loads = [record[f"router_{name}_layer_0"] for name in ("least_load", "load")]
        np.testing.assert_allclose(loads, [tokens.min() / mean, tokens.max() / mean], rtol=1e-6)
    assert first["router_tokens_layer_0"] != last["router_tokens_layer_0"]


def test_resumed_bias_is_the_uninterrupted_one(biased, tmp_path):
    root = shutil.copytree(biased, tmp_path / "moe")
    shutil.rmtree(root / "checkpoints" / "2")
    assert run_here(*BIASED, f"output={tmp_path}", "--resume").succeeded().root == root
    assert_same_arrays(state_arrays(root, 2), state_arrays(biased, 2))
    assert (root / "metrics.jsonl").read_text() == (biased / "metrics.jsonl").read_text()


def test_export_names_the_bias_without_a_tensor(biased, tmp_path, capsys):
    assert export([str(biased), "--to", str(tmp_path / "hf")]) == 2
    message = capsys.readouterr().err
    assert "error: --format: got hf, which has no tensor for the bias that the routers of the run have" in message
    assert "leave it out with --drop-router-bias" in message
    assert not (tmp_path / "hf").exists()
    assert export([str(biased), "--to", str(tmp_path / "hf"), "--drop-router-bias"]) == 0
    assert export([str(biased), "--to", str(tmp_path / "orbax"), "--format", "orbax"]) == 0
    saved = saved_arrays(tmp_path / "orbax")["layers.mlp.choice_bias"]
    np.testing.assert_array_equal(saved, state_arrays(biased, 2)[LEAF])
    assert export([str(biased), "--to", str(tmp_path / "no"), "--format", "orbax", "--drop-router-bias"]) == 2
    assert "only --format hf drops a bias, but the format is orbax" in capsys.readouterr().err


def test_weights_without_a_bias_begin_at_zero(biased, recording, tmp_path):
    """Weights may be of a folder or of another run; a reference has the bias of its own run."""
    assert export([str(biased), "--to", str(tmp_path / "hf"), "--drop-router-bias"]) == 0
    unbiased = recording / "runs" / "moe"
    config, tokenizer = SavedRun.at(biased).config, ByteTokenizer()
    model, mesh = make_model(config, tokenizer), config_mesh(config)
    sources = {
        "warm_start.checkpoint": unbiased / "checkpoints/2",
        "model.path": tmp_path / "hf",
    }
    for field, path in sources.items():
        section, _, name = field.partition(".")
        update = {section: getattr(config, section).model_copy(update={name: str(path)})}
        params = load_initial_base(config.model_copy(update=update), model, mesh)
        np.testing.assert_array_equal(params["layers"]["mlp"]["choice_bias"], np.zeros((1, 4), np.float32))
        expected = state_arrays(unbiased if section == "warm_start" else biased, 2)
        kernel = expected["trainable.params.layers.mlp.gate.kernel"]
        np.testing.assert_array_equal(params["layers"]["mlp"]["gate"]["kernel"], kernel)
    for run in (biased, unbiased):
        section = {"source": "checkpoint", "path": str(run / "checkpoints/2")}
        fields = {"steps": 1, "reference": section, "kl": {"loss": {"coef": 0.1}}}
        reference = find_reference(parse(fields)[0], model)
        assert reference.model.config.experts.choice_bias == (run == biased)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Two steps that the sampler of this process recorded, and below `runs` the run of the recipe without a bias."""
    directory = tmp_path_factory.mktemp("recording")
    run_here(*MOE, f"rollout.record={directory}", f"output={directory / 'runs'}").succeeded()
    return directory


def rewritten(recording, target, change) -> str:
    """Copies a recording, with changed routes in its second step; returns the option that reads it."""
    target.mkdir()
    for number, path in enumerate(sorted(recording.glob("*.jsonl"))):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            del row["kljax_check"]
            row[ROUTES] = change(np.array(row[ROUTES])).tolist() if number else row[ROUTES]
        (target / path.name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"rollout.source={{type: file, path: {target}, shuffle: false}}"


def shifted(routes):
    """The routes of the token before; the first token keeps its own, and the last has none."""
    return np.concatenate([routes[:1], routes[:-2], routes[-1:]])


def other(routes):
    return np.where(routes < 0, -1, (routes + 1) % 4)


def test_verify_ends_a_run_with_shifted_routes(recording, tmp_path):
    """The step before is as it was saved, and with the right recording the run goes on from there."""
    source = rewritten(recording, tmp_path / "recorded", shifted)
    ended = run_here(*MOE, source, f"output={tmp_path / 'runs'}")
    assert ended.returncode == 3
    assert "error: step 2: routing.verify: routed_experts are shifted by one token: " in ended.stderr
    assert "the router chooses the experts of the token after in 1 of the cases" in ended.stderr
    assert "Traceback" not in ended.stderr
    checkpoints = ended.root / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["0", "1"]
    before = files(checkpoints)
    shutil.rmtree(tmp_path / "recorded")
    rewritten(recording, tmp_path / "recorded", lambda routes: routes)
    # It has the digests of the recording that was wrong.
    (ended.root / "inputs.json").unlink()
    resumed = run_here(*MOE, source, f"output={tmp_path / 'runs'}", "--resume").succeeded()
    uninterrupted = run_here(*MOE, source, f"output={tmp_path / 'whole'}").succeeded()
    assert before.items() <= files(checkpoints).items()
    assert_same_arrays(state_arrays(resumed.root, 2), state_arrays(uninterrupted.root, 2))
    assert (resumed.root / "metrics.jsonl").read_text() == (uninterrupted.root / "metrics.jsonl").read_text()


# The same end for the other cause; `test_verified_routes_are_the_recorded_ones` names both.
@pytest.mark.thorough
def test_verify_ends_a_run_with_lost_routes(recording, tmp_path, monkeypatch):
    """A trainer that chooses for itself; the other limit of the gradient keeps its programs from other runs."""
    monkeypatch.setattr(Transformer, "_of_stack", lambda *arguments: None)
    source = rewritten(recording, tmp_path / "recorded", other)
    ended = run_here(*MOE, source, "optim.max_grad_norm=0.9", f"output={tmp_path / 'runs'}")
    assert ended.returncode == 3
    message = "error: step 2: routing.verify: the update used other experts than the recorded ones (layer 0: "
    assert message in ended.stderr
    assert sorted(path.name for path in (ended.root / "checkpoints").iterdir()) == ["0", "1"]
