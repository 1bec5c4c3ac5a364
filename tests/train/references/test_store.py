"""Rows of a recording go through a constant reference once; the run has the same bits, also when it is resumed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.config.plan import Plan
from train.data.tokenizers import ByteTokenizer
from train.models.sharding import batch_sharding, replicated
from train.references import store
from train.references.store import ReferenceStore, make_reference_store
from train.rl.policy import ScoredPolicy
from train.rl.reference import FrozenWeights
from train.rl.step import make_score
from train.rollouts.open import open_stream
from train.run.loop import rl_step
from train.run.programs import Programs
from train.sequences.batch import Batch, prompt_lengths

PROMPTS, PER_EPOCH, EPOCHS, STOPPED = 6, 3, 3, 4
STEPS = EPOCHS * PER_EPOCH
TRAINED = (
    "kl.loss.coef=0.1",
    "rollout.prompts_per_step=2",
    # Two updates, so that the policy is scored too.
    "optim={epochs: 2, micro_batches: 2, learning_rate: 1e-2}",
)


def recording(directory) -> str:
    """Writes a recording whose completions begin with the number of their row; returns the option that reads it."""
    rows, end = [], ByteTokenizer().eos_id
    for row in range(tiny.SAMPLES * PROMPTS):
        group = row // tiny.SAMPLES
        prompt = [*[1] * (1 + group % 3), group]
        ids = [row, *[7] * (row % 3), end]
        rows.append({"prompt_ids": prompt, "completion_ids": ids, "group": group, "reward": row % 5 / 4})
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"rollout.source={{type: file, path: {path}}}"


class Counted:
    """A program that notes the first completion token of the rows of each call."""

    def __init__(self, program) -> None:
        self.program, self.calls = program, []

    def __call__(self, base, reference, batch):
        first = np.asarray(prompt_lengths(batch))
        self.calls.append(np.asarray(batch.tokens)[np.arange(len(first)), first].tolist())
        return self.program(base, reference, batch)


class Runs:
    """Runs of one config with a store, whose programs are shared."""

    def __init__(self, directory) -> None:
        self.config = tiny.config_of(recording(directory), *TRAINED)
        self.context = tiny.context_of(self.config)
        self.source = open_stream(self.context)
        self.first = tiny.state_of(self.config, self.context.optimizer)
        params = tiny.moved(tiny.host_params(), 0.02)
        model = self.context.model
        self.frozen = FrozenWeights(None, ScoredPolicy(model, kljax.Policy(jax.tree.map(jnp.asarray, params))))
        with jax.set_mesh(self.context.mesh):
            self.programs = Programs.of(self.context, self.first, self.source.row_count)
            self.scored = Counted(store.make_reference_score(Plan.of(self.config), model, self.context.mesh))

    def fresh(self) -> Programs:
        """The programs with an empty store."""
        rows = tiny.SAMPLES * PROMPTS
        empty = ReferenceStore(self.scored, self.context.mesh, rows=rows, columns=tiny.NEW_TOKENS)
        return dataclasses.replace(self.programs, store=empty)

    def run(self, programs, state, steps):
        """The states after these steps, and their metrics."""
        states, metrics = [], []
        with jax.set_mesh(self.context.mesh):
            for step in steps:
                # A step donates its state.
                state, values, _ = rl_step(
                    self.context, programs, self.source, self.frozen, tiny.copied(state), step=step
                )
                states.append(state)
                metrics.append(values)
        return states, metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("recording"))


@pytest.fixture(scope="module")
def whole(runs):
    """A run of three epochs, and the rows that the reference scored in it."""
    runs.scored.calls.clear()
    actual = runs.run(runs.fresh(), runs.first, range(STEPS))
    return *actual, list(runs.scored.calls)


def assert_same(got, expected):
    jax.tree.map(lambda one, two: np.testing.assert_array_equal(np.asarray(one), np.asarray(two)), got, expected)


def test_the_reference_scores_each_row_once(whole):
    _, metrics, calls = whole
    assert len(calls) == PER_EPOCH
    assert sorted(row for call in calls for row in call) == list(range(tiny.SAMPLES * PROMPTS))
    assert all(values["kl_reference"] > 1e-4 for values in metrics)


def test_run_scoring_every_batch_has_equal_bits(runs, whole):
    states, metrics, _ = whole
    program, referenced = make_score(Plan.of(runs.config), runs.context.model, runs.context.mesh), []

    def score(trainable, base, reference, batch):
        referenced.append(reference is not None)
        return program(trainable, base, reference, batch)

    got, expected = runs.run(dataclasses.replace(runs.programs, store=None, score=score), runs.first, range(STEPS))
    assert referenced == [True] * STEPS
    assert metrics == expected
    assert_same(got[-1], states[-1])


def test_resumed_run_scores_again_with_equal_bits(runs, whole):
    """It goes on within the second epoch, with an empty store, so that rows are scored in other batches."""
    states, metrics, calls = whole
    runs.scored.calls.clear()
    got, actual = runs.run(runs.fresh(), states[STOPPED - 1], range(STOPPED, STEPS))
    assert runs.scored.calls
    assert not any(call in calls for call in runs.scored.calls)
    assert actual == metrics[STOPPED:]
    assert_same(got[-1], states[-1])


def test_no_program_scores_known_rows_without_policy_scores(runs):
    config = tiny.config_of(f"rollout.source={{type: file, path: {runs.config.rollout.source.path}}}", *TRAINED[:2])
    assert not Plan.of(config).scores_policy
    context, programs = dataclasses.replace(runs.context, plan=Plan.of(config)), runs.fresh()

    class PreparedError(Exception):
        """Ends a step."""

    def prepare(batch, controllers):
        raise PreparedError(batch)

    def never(*arguments):
        raise AssertionError("a program scored the batch")

    with jax.set_mesh(context.mesh):
        batches = []
        for score in (runs.scored, never):
            programs.store._score = score
            stopping = dataclasses.replace(programs, score=never, prepare=prepare)
            with pytest.raises(PreparedError) as caught:
                rl_step(context, stopping, runs.source, runs.frozen, tiny.copied(runs.first), step=0)
            batches.append(caught.value.args[0])
    assert np.abs(batches[0].ref_log_probs).max() > 1
    assert_same(batches[1], batches[0])


def test_cached_log_probs_have_the_program_sharding():
    """On a mesh; a batch with one new row is scored as a whole."""
    mesh, rng = tiny.mesh_of(data=2, fsdp=2), np.random.default_rng(0)
    values = rng.normal(size=(6, tiny.LENGTH)).astype(np.float32)
    values[:, : tiny.PROMPT] = 0
    calls = []

    @jax.jit
    def gather(tokens):
        return jnp.asarray(values)[tokens[:, 0]]

    def score(base, reference, batch):
        calls.append(np.asarray(batch.tokens)[:, 0].tolist())
        log_probs = gather(batch.tokens)
        return jax.device_put(log_probs, batch_sharding(mesh)), jax.device_put(
            log_probs[:, tiny.PROMPT :], replicated(mesh)
        )

    selected = ReferenceStore(score, mesh, rows=6, columns=tiny.NEW_TOKENS)

    def log_probs(*rows):
        tokens = jnp.tile(jnp.array(rows)[:, None], (1, tiny.LENGTH))
        mask = jnp.ones(tokens.shape, bool)
        batch = Batch(tokens, mask, mask.at[:, : tiny.PROMPT].set(False))
        actual = selected.score(None, None, batch, np.array(rows))
        np.testing.assert_array_equal(actual, values[list(rows)])
        return actual

    scored = log_probs(0, 1, 2, 3)
    placed = log_probs(3, 0, 2, 1)
    assert calls == [[0, 1, 2, 3]]
    assert (placed.dtype, placed.sharding) == (scored.dtype, scored.sharding)
    log_probs(3, 0, 5, 1)
    log_probs(5, 5, 0, 2)
    assert calls[1:] == [[3, 0, 5, 1]]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ((), True),
        (("reference.monitor=true", "kl.loss.coef=0"), True),
        (("kl.loss.coef=0",), False),
        (("reference={source: ema}",), False),
        (("reference.refresh_every=2",), False),
        (("reference={source: step, step: 0, refresh_every: 2}",), False),
        (("kl.loss.estimator=exact", "reference.monitor=true"), False),
        (("reference.monitor=exact",), False),
        (("optim.packing=true",), False),
        (("rollout.source.max_reference_mib=0",), False),
        (("rollout.source={type: jax}",), False),
    ],
    ids=str,
)
def test_changeable_log_probs_are_not_cached(runs, options, kept):
    path = runs.config.rollout.source.path
    config = tiny.config_of(f"rollout.source={{type: file, path: {path}}}", "kl.loss.coef=0.1", *options)
    made = make_reference_store(Plan.of(config), runs.context.model, runs.context.mesh, 4)
    assert (made is not None) == kept


def test_oversized_recording_is_scored_in_every_epoch(runs, capsys):
    path = runs.config.rollout.source.path
    config = tiny.config_of(f"rollout.source={{type: file, path: {path}, max_reference_mib: 1}}", "kl.loss.coef=0.1")
    fits = 2**20 // (4 * tiny.NEW_TOKENS)
    assert make_reference_store(Plan.of(config), runs.context.model, runs.context.mesh, fits) is not None
    assert capsys.readouterr().err == ""
    assert make_reference_store(Plan.of(config), runs.context.model, runs.context.mesh, fits + 1) is None
    assert capsys.readouterr().err == (
        f"warning: rollout.source.max_reference_mib: got 1, expected at least 2 for {fits + 1} rows of 4 tokens; the "
        "reference scores them again in every epoch\n"
    )
