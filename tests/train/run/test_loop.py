"""Steps as the loop runs them: no program is compiled twice, and each step starts where the one before ended."""

import dataclasses
import re
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from tests.run_programs import shared_by_runs
from train.config.errors import UserError
from train.config.schema import Config
from train.data.tasks.user_score import RewardError
from train.data.tokenizers import ByteTokenizer
from train.process.interrupt import Interrupt
from train.rl.metrics import metric_values
from train.rl.policy import ScoredPolicy
from train.rl.reference import FrozenWeights
from train.run.guard import StepGuard
from train.run.loop import require_fields, rl_step, train
from train.run.programs import Programs

CONTROLLER = "{type: adaptive, target: 0.1, horizon: 100}"
CONFIG = tiny.config_of(
    "kl.loss.coef=0.1",
    "kl.rollout.coef=0.1",
    f"kl.reward={{coef: 0.1, controller: {CONTROLLER}}}",
    "loss.entropy_controller={type: adaptive, target: 9.0, delta: 0.01, max_coef: 0.015}",
    "optim={updates_per_batch: 2, micro_batches: 2, learning_rate: 1e-2}",
)


@pytest.fixture(autouse=True, scope="module")
def _shared_programs() -> Iterator[None]:
    """Tests of one config share what they trace."""
    with shared_by_runs():
        yield


def frozen_of(config: Config) -> FrozenWeights:
    policy = kljax.Policy(jax.tree.map(jnp.asarray, tiny.host_params()))
    return FrozenWeights(None, ScoredPolicy(tiny.model_of(config), policy))


def test_rollout_without_a_needed_field_stops_early():
    forgets = CONFIG.rollout.model_copy(update={"record_log_probs": False})
    context = tiny.context_of(CONFIG.model_copy(update={"rollout": forgets}))

    def never(*arguments):
        raise AssertionError("the batch reached the device")

    with jax.set_mesh(context.mesh):
        state = tiny.state_of(CONFIG, context.optimizer)
        programs = dataclasses.replace(Programs.of(context, state), score=never, prepare=never, update=never)
        with pytest.raises(UserError, match="lacks rollout_log_probs"):
            rl_step(context, programs, tiny.stream_of(context), frozen_of(CONFIG), state, step=0)


def test_missing_fields_are_named_with_present_ones():
    batch = tiny.rollout_batch()
    require_fields(batch, ["rewards", "rollout_log_probs"])
    message = (
        "the batch lacks returns, ref_log_probs, which the objective of this config needs; present: tokens, "
        "token_mask, completion_mask, prompt_lengths, rewards, group_ids, rollout_log_probs"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        require_fields(batch, ["returns", "rewards", "ref_log_probs"])


class FakeCheckpoints:
    """Records which steps are saved."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def steps(self) -> list[int]:
        return self.saved

    def save(self, state: object, step: int) -> None:
        self.saved.append(step)

    def wait(self) -> None:
        pass


def run_alone(config, checkpoints, directory, interrupt=None):
    """Runs the loop without programs, for tests that replace its step."""
    context = tiny.context_of(config)
    train(
        context,
        None,
        None,
        None,
        tiny.state_of(config, context.optimizer),
        writer=SimpleNamespace(write=lambda *values: None, timing=lambda *values: None),
        watch=StepGuard(config, checkpoints, directory / "nonfinite"),
        interrupt=interrupt or Interrupt(),
        advance=lambda note: None,
    )


def test_failing_reward_function_leaves_a_saved_run(monkeypatch, tmp_path):
    checkpoints = FakeCheckpoints()

    def fail(*_, **__):
        raise RewardError("data.reward: no answer")

    monkeypatch.setattr("train.run.loop.rl_step", fail)
    with pytest.raises(RewardError) as caught:
        run_alone(CONFIG, checkpoints, tmp_path)
    assert str(caught.value) == ("data.reward: no answer\nThe run is saved after step 0; continue it with --resume")
    assert checkpoints.saved == [0]


def test_interrupted_run_saves_its_last_step(monkeypatch, tmp_path):
    config = tiny.config_of("steps=9", "checkpoint.every=100", "eval.prompts=0")
    checkpoints = FakeCheckpoints()
    interrupt = Interrupt()

    def step(context, programs, stream, frozen, state, *, step, **options):
        interrupt.requested = step == 1
        return state, {"loss": 0.0, "skipped_updates": 0.0}, {}

    monkeypatch.setattr("train.run.loop.rl_step", step)
    monkeypatch.setattr("train.run.loop._parts", lambda seconds, compiled: "")
    run_alone(config, checkpoints, tmp_path, interrupt)
    assert checkpoints.saved == [2]


def test_three_steps_compile_once_and_carry_state():
    context = tiny.context_of(CONFIG)
    with jax.set_mesh(context.mesh):
        state = tiny.state_of(CONFIG, context.optimizer)
        programs, stream, frozen = Programs.of(context, state), tiny.stream_of(context), frozen_of(CONFIG)
        compilations: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(lambda event, _, **__: compilations.append(event))
        metrics = []
        for step in range(3):
            if step == 2:
                compilations.clear()
            state, values, _ = rl_step(context, programs, stream, frozen, state, step=step)
            metrics.append(values)
    # Not only traced once (which ends the run): an input laid out otherwise compiles again without a new trace.
    assert not [event for event in compilations if "compile" in event]
    assert int(state.step) == 3
    # The policy is its reference at first, so the raw KL starts at 0 and the coefficient falls as fast as it may.
    assert abs(metrics[0]["kl_reward"]) < 1e-6
    assert metrics[-1]["kl_reference"] > 1e-4
    coef, coefs = 0.1, []
    for values in metrics:
        coefs.append(coef)
        coef *= 1 + np.clip(values["kl_reward"] / 0.1 - 1, -0.2, 0.2) * tiny.ROWS / 100
    np.testing.assert_allclose([values["kl_coef"] for values in metrics], coefs, rtol=1e-5)
    np.testing.assert_allclose(state.controllers["reward"].coef, coef, rtol=1e-5)
    # No policy has so high an entropy.
    np.testing.assert_allclose([values["entropy_coef"] for values in metrics], [0, 0.01, 0.015], rtol=1e-6)


def test_guard_is_told_the_metrics_of_the_leader(monkeypatch):
    context, told = tiny.context_of(CONFIG), []
    of_leader = {"metrics": lambda values: values | {"skipped_updates": 0.5}}
    monkeypatch.setattr("train.run.loop.of_leader", lambda label, values: of_leader[label](values))
    with jax.set_mesh(context.mesh):
        state = tiny.state_of(CONFIG, context.optimizer)
        programs, stream, frozen = Programs.of(context, state), tiny.stream_of(context), frozen_of(CONFIG)

        def inspect(batch, state, values, tokens):
            told.append(values["skipped_updates"])

        _, values, _ = rl_step(context, programs, stream, frozen, state, step=0, inspect=inspect)
    assert told == [values["skipped_updates"]] == [0.5]


def test_devices_score_while_the_host_verifies():
    """The sampler and the scores are under way before a completion is decoded or judged."""
    events: list[str] = []

    def noting(name, function):
        def call(*arguments, **options):
            events.append(name)
            return function(*arguments, **options)

        return call

    context = tiny.context_of(CONFIG)
    task = dataclasses.replace(context.task, score=noting("judge", context.task.score))
    context = dataclasses.replace(context, task=task, tokenizer=Decodes(noting("decode", context.tokenizer.decode)))
    with jax.set_mesh(context.mesh):
        state = tiny.state_of(CONFIG, context.optimizer)
        programs = Programs.of(context, state)
        named = {name: noting(name, getattr(programs, name)) for name in ("score", "prepare", "update")}
        programs = dataclasses.replace(programs, **named)
        rl_step(context, programs, tiny.stream_of(context), frozen_of(CONFIG), state, step=0)
    rows = tiny.ROWS
    assert events == ["score", *["decode"] * rows, *["judge"] * rows, "prepare", "update", "update"]


class Decodes(ByteTokenizer):
    """A tokenizer with another `decode`."""

    def __init__(self, decode) -> None:
        super().__init__()
        self.decode = decode


def test_sums_are_divided_on_the_host():
    pair = kljax.WeightedSum(jnp.float32(3), jnp.float32(4))
    nothing = kljax.WeightedSum.zero()
    values = metric_values({"a": pair, "b": nothing})
    assert values == {"a": 0.75, "b": 0.0}
    assert {type(value) for value in values.values()} == {float}
