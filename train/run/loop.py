"""The RL loop: sample, judge, score, prepare, update; evaluate and save every so often."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from train.references import current_reference, make_follow, reference_head, with_place, without_base
from train.rl.batch import require
from train.rl.keys import purpose_key
from train.rl.objective import Metrics, coefficients, required_fields
from train.rl.state import TrainState, policy_of, policy_part
from train.rl.step import SCORED, make_prepare, make_score, make_update, update_rows
from train.rollouts import Sampler, Source, SourceError, collect, make_sampler, next_past, sampling_policy
from train.run.evaluate import evaluate
from train.run.interrupt import Interrupt
from train.run.metrics import MetricsWriter
from train.run.setting import Setting
from train.weights.checkpoint import Checkpoints

Tree = Any


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled functions of a run, each compiled once."""

    score: Callable[..., Any]
    prepare: Callable[..., Any]
    update: Callable[..., Any]
    follow: Callable[..., Any] | None
    held_out: Sampler
    greedy: Sampler

    @classmethod
    def of(cls, setting: Setting, state: TrainState) -> "Programs":
        """The programs for this setting and states of this layout."""
        config, model, mesh = setting.config, setting.model, setting.mesh
        moving = with_place(config, state).reference
        return cls(
            score=make_score(config, model, mesh),
            prepare=make_prepare(config, mesh),
            update=make_update(config, model, setting.optimizer, _updated_part(state), mesh),
            follow=None if moving is None else make_follow(config, moving),
            held_out=make_sampler(setting, name="held_out"),
            greedy=make_sampler(setting, name="greedy", greedy=True),
        )


def rl_step(
    setting: Setting, programs: Programs, source: Source, state: TrainState, step: int
) -> tuple[TrainState, dict, dict]:
    """One rollout batch and every update on it. Returns the state, the metrics and the seconds of each part."""
    config, clock = setting.config, time.perf_counter()
    source.update(*sampling_policy(state, setting.base))
    rollout = collect(setting, source, step)
    sampled = time.perf_counter()
    reference, moving = current_reference(setting.reference, state), state.reference
    past, state = next_past(state), _updated_part(state)
    recorded = [name for name in required_fields(config) if name not in SCORED]
    require(rollout.batch, recorded, "the objective of this config")
    batch = programs.score(state.trainable, setting.base, without_base(reference, setting.base), rollout.batch)
    batch, controller, totals = programs.prepare(batch, state.controller)
    coefs, ref_head = coefficients(config), reference_head(config, setting.model, reference)
    for rows in update_rows(config, purpose_key(config.seed, "rows", step)):
        state, metrics = programs.update(state, setting.base, batch, rows, coefs, ref_head=ref_head)
        totals = totals | {name: totals[name] + new if name in totals else new for name, new in metrics.items()}
    state = dataclasses.replace(state, step=state.step + 1, controller=controller, past=past)
    if programs.follow is not None:
        moving = programs.follow(moving, state.trainable[policy_part(state.trainable)], state.step)
        state = dataclasses.replace(state, reference=moving)
    values = rollout.metrics | divide(totals)
    seconds = {"rollout": sampled - clock, "update": time.perf_counter() - sampled}
    return state, values, seconds | rollout.timings


def _updated_part(state: TrainState) -> TrainState:
    """What an update changes, whose buffers it gives away: not the ring, nor a reference that it reads."""
    return dataclasses.replace(state, past=None, reference=None)


def divide(weighted: Metrics) -> dict[str, float]:
    """Means are divided once, on the host."""
    return {name: float(total.value()) for name, total in jax.device_get(weighted).items()}


def write_evaluation(setting: Setting, programs: Programs, state: TrainState, writer: MetricsWriter, step: int) -> None:
    """Evaluates the current policy on the held-out prompts; writes the metrics and some of its completions.

    `accuracy` is that of the policy itself, sampled at the temperature it is trained at, with the same keys every time;
    `accuracy_greedy` that of its most probable tokens.
    """

    policy, key = policy_of(state.trainable, setting.base), purpose_key(setting.config.seed, "held_out")
    sampled, greedy = (evaluate(setting, one, policy, key) for one in (programs.held_out, programs.greedy))
    writer.write("eval", step, {**sampled.metrics, "accuracy_greedy": greedy.metrics["accuracy"]})
    writer.samples(step, sampled.samples)


def train(
    setting: Setting,
    programs: Programs,
    source: Source,
    state: TrainState,
    *,
    writer: MetricsWriter,
    checkpoints: Checkpoints,
    interrupt: Interrupt,
    advance: Callable[[str], None],
) -> TrainState:
    """Runs until `config.steps`, or until an interrupt was asked for; the last step is saved either way.

    The lines of a step are written before its checkpoint, so the metrics of a resumed run have no gap.

    Raises:
      SourceError: the source of the completions is gone; the state before the step is saved.
    """
    config = setting.config
    done = int(state.step)
    while done < config.steps and not interrupt.asked:
        try:
            state, values, seconds = rl_step(setting, programs, source, state, done)
        except SourceError as error:
            if done not in checkpoints.steps():
                checkpoints.save(state, done)
            checkpoints.wait()
            raise SourceError(f"{error}\nThe run is saved after step {done}; continue it with --resume") from error
        done += 1
        writer.write("train", done, values)
        writer.timing(done, seconds)
        last = done == config.steps
        if last or done % config.eval.every == 0:
            write_evaluation(setting, programs, state, writer, done)
        if last or interrupt.asked or done % config.checkpoint.every == 0:
            checkpoints.save(state, done)
        advance(_note(values))
    jax.block_until_ready(state)
    checkpoints.wait()
    return state


def _note(values: dict[str, float]) -> str:
    shown = {
        "reward": "reward {:.3f}",
        "kl_reference": "KL {:.4f}",
        "kl_reference_exact": "exact KL {:.4f}",
        "entropy": "entropy {:.3f}",
    }
    return "  ".join(text.format(values[name]) for name, text in shown.items() if name in values)
