"""The guard on the host: what it says of skipped updates, what it does beyond a limit, what it never saves."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.run_programs import shared_by_runs
from tests.train.config.built import build, problems
from train.__main__ import main
from train.config.errors import GuardError
from train.rl.algorithms import make_optimizer
from train.run.guard import Watch
from train.weights.orbax import Checkpoints

MONITOR = "reference.monitor=true"
VALUES = {"skipped_updates": 0.0, "kl_reference": 0.2, "entropy": 1.0}


def at(state, step):
    return dataclasses.replace(state, step=jnp.int32(step))


@pytest.fixture
def watch_of(tmp_path):
    """A watch of a config, over checkpoints with step 0, and that state."""
    opened = []

    def make(*overrides):
        config = tiny.config_of(*overrides)
        checkpoints = Checkpoints(tmp_path / f"checkpoints-{len(opened)}", config.checkpoint)
        opened.append(checkpoints)
        state = tiny.state_of(config, make_optimizer(config.optim))
        checkpoints.save(state, 0)
        checkpoints.wait()
        return Watch(config, checkpoints, tmp_path / "nonfinite"), state

    yield make
    for checkpoints in opened:
        checkpoints.close()


def test_a_state_that_is_not_finite_is_never_saved(watch_of):
    watch, state = watch_of()
    params = state.trainable["params"]
    layers = {"params": params | {"layers": jax.tree.map(lambda x: x * jnp.nan, params["layers"])}}
    with pytest.raises(GuardError, match=r"step 1: trainable\.params\.layers.* is not finite; not saved\n.*step 0"):
        watch.save(dataclasses.replace(state, trainable=layers), 1)
    assert watch.checkpoints.steps() == [0]


def test_skipped_updates_are_reported_with_the_first_array_and_the_batch(watch_of, tmp_path, capsys):
    watch, state = watch_of("guard.max_skipped=2")
    batch = tiny.full_batch(np.zeros((tiny.ROWS, tiny.LENGTH)))
    poisoned = dataclasses.replace(batch, rollout_log_probs=batch.rollout_log_probs.at[0, 5].set(jnp.nan))
    watch.inspect(poisoned, at(state, 3))
    file = tmp_path / "nonfinite" / "step-3.npz"
    text = capsys.readouterr().err
    assert "step 3: an update was skipped, because rollout_log_probs is not finite" in text
    assert str(file) in text
    with np.load(file) as saved:
        np.testing.assert_array_equal(saved["rollout_log_probs"], poisoned.rollout_log_probs)
        assert {"tokens", "completion_mask", "advantages"} <= set(saved)
    skipping = dataclasses.replace(at(state, 3), guard=dataclasses.replace(state.guard, skipped=jnp.int32(1)))
    assert watch.check(skipping, VALUES | {"skipped_updates": 1.0}) is skipping
    last = dataclasses.replace(skipping, guard=dataclasses.replace(state.guard, skipped=jnp.int32(2)))
    with pytest.raises(GuardError, match=r"guard\.max_skipped: 2 updates in a row .* rollout_log_probs is not finite"):
        watch.check(last, VALUES | {"skipped_updates": 1.0})
    # The weights are good, so they are saved, and a run that goes on counts anew.
    restored = watch.checkpoints.restore_last(state)
    assert (int(restored.step), int(restored.guard.skipped)) == (3, 0)


def test_beyond_a_limit_the_run_stops_and_the_step_is_not_saved(watch_of):
    watch, state = watch_of(MONITOR, "guard.max_kl=0.1")
    message = r"step 4: guard\.max_kl: the KL to the reference is 0\.2, the limit 0\.1; step 4 is not saved\n.* step 0"
    with pytest.raises(GuardError, match=message):
        watch.check(at(state, 4), VALUES)
    watch, state = watch_of("guard.min_entropy=2")
    with pytest.raises(GuardError, match=r"guard\.min_entropy: the entropy is 1, the limit 2"):
        watch.check(at(state, 4), VALUES)


def test_a_roll_back_takes_the_last_weights_and_goes_on_with_the_prompts(watch_of, capsys):
    watch, state = watch_of(MONITOR, "guard={max_kl: 0.1, action: roll_back, max_actions: 1}")
    moved = dataclasses.replace(at(state, 4), trainable=jax.tree.map(lambda x: x + 1, state.trainable))
    back = watch.check(moved, VALUES)
    for got, expected in zip(jax.tree.leaves(back.trainable), jax.tree.leaves(state.trainable), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert (int(back.step), int(back.guard.actions)) == (4, 1)
    assert "rolled back to the weights of step 0" in capsys.readouterr().err
    with pytest.raises(GuardError, match=r"for the 2\. time \(guard\.max_actions\)"):
        watch.check(back, VALUES)


def test_the_learning_rate_is_lowered_in_the_state(watch_of):
    watch, state = watch_of(MONITOR, "guard={max_kl: 0.1, action: lower_learning_rate, learning_rate_factor: 0.25}")
    lower = watch.check(watch.check(at(state, 4), VALUES), VALUES)
    assert (float(lower.guard.rate), int(lower.guard.actions)) == (0.0625, 2)
    assert watch.check(lower, VALUES | {"kl_reference": 0.05}) is lower


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("guard.max_kl=0.1", r"guard.max_kl: got 0.1, but no KL to the reference is measured"),
        ("guard.action=roll_back", "guard.action: got roll_back, which answers a limit, but there is none"),
        ("guard.learning_rate_factor=0.1", "guard.learning_rate_factor: got 0.1, which guard.action stop does not use"),
        ("guard.max_actions=1", "guard.max_actions: got 1, which guard.action stop does not use"),
        ("guard.max_skipped=0", "guard.max_skipped: got 0, expected an integer >= 1"),
    ],
)
def test_a_guard_that_cannot_work_is_refused(override, message):
    assert any(message in problem for problem in problems(override, "kl.loss.coef=0"))


def test_limits_go_with_any_measured_kl():
    build(MONITOR, "guard.max_kl=0.1")
    build("kl.loss.coef=0.1", "kl.loss.estimator=exact", "guard.max_kl=0.1")


def test_a_run_that_diverges_stops_with_its_own_code_and_can_be_continued(tmp_path, capsys):
    # The first update is finite, and moves the policy; the KL term of the second is beyond float32.
    config = (
        *("configs/smoke.yaml", f"output={tmp_path}", "kl.loss.coef=3e38", "steps=9", "guard.max_skipped=3"),
        *("warm_start.steps=0", "eval={every: 9, prompts: 2, batch_size: 2, greedy: false}"),
    )
    with shared_by_runs():
        assert main(config) == 3
        text = capsys.readouterr().err
        assert "guard.max_skipped: 3 updates in a row were skipped" in text
        assert re.search(r"because the norm of the gradient of params\.\S+ is not finite; the batch is in ", text)
        records = [json.loads(line) for line in (tmp_path / "smoke" / "metrics.jsonl").read_text().splitlines()]
        steps = [record for record in records if record["phase"] == "train"]
        assert steps[-1]["skipped_updates"] == 1
        assert steps[0]["skipped_updates"] < 1
        assert len(steps) < 9
        assert list((tmp_path / "smoke" / "nonfinite").iterdir())
        # It counts anew: two batches of two updates.
        assert main([*config, "--resume"]) == 3
        assert "updates in a row were skipped" in capsys.readouterr().err
