"""The RL loop: sample, judge, score, prepare, update; evaluate and save every so often."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax

import kljax
from train.config.errors import UserError
from train.config.plan import STEERED
from train.context import RunContext
from train.data.tasks.user_score import RewardError
from train.distributed.exchange import any_of, of_leader
from train.distributed.peer_watch import enter
from train.process.interrupt import Interrupt, StepLeftError, leave_if_stopping
from train.references.follow import current_reference
from train.rl.keys import purpose_key
from train.rl.kl_metrics import KL_ESTIMATE, KL_EXACT
from train.rl.metrics import LargestToken, add_update, metric_values, single
from train.rl.metrics import Metrics as StepMetrics
from train.rl.objective import coefficients
from train.rl.preparation import Controllers
from train.rl.reference import FrozenWeights, reference_head
from train.rl.state import TrainState, policy_of, policy_part
from train.rl.step import SCORED, update_rows
from train.rl.token_values import TokenValues
from train.rollouts.collect import Rollout, arrive, draw, judge_drawn
from train.rollouts.lag import next_past, sampling_policy
from train.rollouts.source import SourceError
from train.rollouts.stream import Stream
from train.run.display import Phase
from train.run.evaluate import evaluate
from train.run.guard import StepGuard
from train.run.metrics import Metrics
from train.run.programs import Programs, updated_part
from train.run.recorder import RolloutRecorder
from train.run.rollout_watch import RolloutWatch
from train.run.routes import flips_by_lag, loads_by_expert, verify_routes
from train.sequences.batch import Batch, present_arrays
from train.sequences.packing import StepPacking

Tree = Any


def rl_step(
    context: RunContext,
    programs: Programs,
    stream: Stream,
    frozen: FrozenWeights,
    state: TrainState,
    *,
    step: int,
    inspect: Callable[[Batch, TrainState, Mapping[str, float], Mapping[str, LargestToken]], None] | None = None,
    recorder: RolloutRecorder | None = None,
    interrupt: Interrupt | None = None,
) -> tuple[TrainState, dict, dict]:
    """Takes one rollout batch and makes every update on it; returns state, metrics and seconds of each part.

    `inspect` is called with the scored batch, the state, the metrics, and the metrics that name a token. The programs
    of a `recorder` are per token.

    Raises:
      StepLeftError: a signal came to `interrupt` before the updates; no array of the state is donated yet.
      UserError: a field of the batch is missing, or a reward has the name of a metric.
    """
    config = context.config
    plan = context.plan
    began = time.perf_counter()
    enter(step + 1, "rollout")
    stream.update(*sampling_policy(state, frozen.base))
    leaving = nullcontext if interrupt is None else interrupt.leaving_steps
    with leaving():
        drawn = draw(context, stream, step)
    context.layout.release()

    # The updates read the references and the past, and must not donate them.
    weights = FrozenWeights(frozen.base, current_reference(frozen.reference, state))
    past = next_past(state)
    reference = state.reference
    state = updated_part(state)

    require_fields(drawn.batch, [name for name in plan.fields if name not in (*SCORED, "rewards")])
    updates = update_rows(config, purpose_key(config.seed, "rows", step))
    packing = StepPacking.off(updates) if programs.pack is None else programs.pack(drawn.batch, updates)
    scored = _score(context, programs, weights, state, drawn, packing=packing)
    # The devices sample and score while the host decodes and judges.
    drawn = arrive(drawn)
    arrived = time.perf_counter()
    rollout = judge_drawn(context, drawn, step)
    judged = time.perf_counter()
    with leaving():
        leave_if_stopping(together=True)

    enter(step + 1, "update")
    batch = dataclasses.replace(scored, rewards=rollout.batch.rewards, kept_mask=rollout.batch.kept_mask)
    batch, controllers, metrics = programs.prepare(batch, state.controllers)
    state, metrics, values_of_tokens = _make_updates(
        context, programs, weights, state, batch, controllers=controllers, metrics=metrics, packing=packing, step=step
    )
    if programs.control is not None:
        steered = {name: metrics[STEERED[name].measured] for name in plan.steered}
        metrics |= {STEERED[name].coefficient: single(controllers[name].coef) for name in plan.steered}
        controllers = programs.control(controllers, steered, batch.completion_mask)
    state = dataclasses.replace(state, step=state.step + 1, controllers=controllers, past=past)
    if programs.follow is not None:
        policy = state.trainable[policy_part(state.trainable)]
        state = dataclasses.replace(state, reference=programs.follow(reference, policy, state.step))

    metrics = jax.device_get(metrics)
    # What the guard decides by them, all processes have to decide alike.
    measured = of_leader("metrics", metric_values(metrics)) | dict(packing.metrics)
    sampled = rollout.completions.metrics
    if repeated := sampled.keys() & measured.keys():
        raise UserError(f"rewards: got a reward named {min(repeated)!r}, a name of the trainer; rename it")
    values = {**sampled, **measured}
    values |= flips_by_lag(values)
    if programs.store is not None:
        programs.store.collect()
    if inspect is not None:
        inspect(batch, state, values, {name: x for name, x in metrics.items() if isinstance(x, LargestToken)})
    updated = time.perf_counter()

    seconds = {"rollout": arrived - began, "rewards": judged - arrived, "update": updated - judged}
    if recorder is not None:
        recorder.record(step + 1, rollout.completions, batch, values_of_tokens)
        seconds["record"] = time.perf_counter() - updated
    seconds |= dict(rollout.completions.timings) | dict(packing.programs)
    return state, values | loads_by_expert(metrics), seconds


def _make_updates(
    context: RunContext,
    programs: Programs,
    weights: FrozenWeights,
    state: TrainState,
    batch: Batch,
    *,
    controllers: Controllers,
    metrics: StepMetrics,
    packing: StepPacking,
    step: int,
) -> tuple[TrainState, StepMetrics, list[TokenValues]]:
    """Makes every update on a prepared batch; returns the state, the metrics of all, and the values of their tokens."""
    coefs = coefficients(context.config, controllers)
    ref_head = reference_head(context.plan, weights.reference)
    values_of_tokens: list[TokenValues] = []
    for number, (rows, packed) in enumerate(packing.updates):
        if context.plan.key:
            coefs["key"] = jax.random.fold_in(purpose_key(context.config.seed, "loss", step), number)
        state, of_update, *per_token = programs.update(
            state, weights.base, batch, rows, coefs, ref_head=ref_head, packed=packed
        )
        values_of_tokens += per_token
        metrics = add_update(metrics, of_update, number)
    return state, metrics, values_of_tokens


def _score(
    context: RunContext,
    programs: Programs,
    weights: FrozenWeights,
    state: TrainState,
    drawn: Rollout,
    *,
    packing: StepPacking,
) -> Batch:
    """Scores a batch with policy and reference; with a store, each with a program of its own, if it has to run."""
    batch = drawn.batch
    if programs.store is None:
        return programs.score(state.trainable, weights.base, weights.reference, batch, **packing.score)
    rows = drawn.completions.recorded_rows
    # Only a recording has a store, with a reference.
    assert weights.reference is not None
    assert rows is not None
    log_probs = programs.store.score(weights.base, weights.reference, batch, rows)
    if context.plan.scores_policy:
        batch = programs.score(state.trainable, weights.base, None, batch)
    return dataclasses.replace(batch, ref_log_probs=log_probs)


def require_fields(batch: Batch, names: Iterable[str]) -> None:
    """Raises `UserError` naming the fields of a batch that the objective reads and that are missing."""
    present = present_arrays(batch)
    missing = [name for name in names if name not in present]
    if missing:
        raise UserError(
            f"the batch lacks {', '.join(missing)}, which the objective of this config needs; present: "
            f"{', '.join(present)}"
        )


def write_evaluation(context: RunContext, stream: Stream, policy: kljax.Policy, writer: Metrics, step: int) -> None:
    """Evaluates a policy on the held-out prompts; writes the metrics and some completions.

    `accuracy` is sampled at the training temperature, with the same keys every time; `accuracy_greedy`, if the config
    wants it, is greedy.
    """
    enter(step, "evaluation")
    key = purpose_key(context.config.seed, "held_out")
    sampled = evaluate(context, stream, policy, key, step=step)
    metrics = dict(sampled.metrics)
    if context.config.eval.greedy:
        greedy = evaluate(context, stream, policy, key, step=step, greedy=True)
        metrics["accuracy_greedy"] = greedy.metrics["accuracy"]
    writer.write("eval", step, metrics)
    writer.samples(step, [{**sample, "decoding": "sampled"} for sample in sampled.samples])


@contextmanager
def saving_on_failure(watch: StepGuard, state: TrainState, step: int) -> Iterator[None]:
    """Saves the state of a step, and says so, if the source of completions or the reward function fails."""
    try:
        yield
    except (SourceError, RewardError) as error:
        watch.save(state, step)
        watch.wait()
        raise type(error)(f"{error}\nThe run is saved after step {step}; continue it with --resume") from error


def evaluate_state(
    context: RunContext,
    stream: Stream,
    state: TrainState,
    base: Tree,
    step: int,
    *,
    writer: Metrics,
    watch: StepGuard,
    phase: Phase,
) -> None:
    """Evaluates the policy of a state over its base; the state is saved if the source or the reward function fails."""
    kinds = "sampled and greedy" if context.config.eval.greedy else "sampled"
    label = f"evaluation of step {step}: {len(context.held_out)} held-out prompts, {kinds}"
    with phase(label), saving_on_failure(watch, state, step):
        write_evaluation(context, stream, policy_of(state.trainable, base), writer, step)


def train(
    context: RunContext,
    programs: Programs,
    stream: Stream,
    frozen: FrozenWeights,
    state: TrainState,
    *,
    writer: Metrics,
    watch: StepGuard,
    interrupt: Interrupt,
    advance: Callable[[str], None],
    evaluation: Stream | None = None,
    recorder: RolloutRecorder | None = None,
    phase: Phase = nullcontext,
    traced: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
) -> TrainState:
    """Trains until `config.steps` or an interrupt; the last step is saved either way.

    The metrics of a step are written before its checkpoint, so the metrics of a resumed run have no gap.

    Args:
      context: of the run.
      programs: of the run.
      stream: of the rollouts.
      frozen: the weights that no update changes.
      state: the first state.
      writer: writes the metrics.
      watch: checks metrics and state, and saves.
      interrupt: tells of signals.
      advance: is told of every step.
      evaluation: completes the held-out prompts; None: nothing is evaluated.
      recorder: records rollouts.
      phase: shows what is under way.
      traced: encloses a step that is profiled.

    Raises:
      SourceError: the source of completions failed; the state before the step or the evaluation is saved, and a run
        that continues there evaluates first.
      RewardError: the reward function failed; likewise.
      GuardError: numbers were not finite, a limit was left, or other routes were used than recorded ones.
    """
    config = context.config
    rollout_watch = RolloutWatch(context.plan)
    first = done = int(state.step)

    def evaluate_if_due(step: int) -> None:
        if evaluation is None or (step != config.steps and step % config.eval.every):
            return
        # A run that continues, or is new, may have it.
        if not any_of("evaluation", writer.is_evaluated(step)):
            evaluate_state(context, evaluation, state, frozen.base, step, writer=writer, watch=watch, phase=phase)

    evaluate_if_due(first)
    stop = any_of("interrupt", interrupt.requested)
    while done < config.steps and not stop:
        try:
            compiling = ", compiling its programs first" if done == first else ""
            with phase(f"step {done + 1}{compiling}"), traced(done + 1), saving_on_failure(watch, state, done):
                state, values, seconds = rl_step(
                    context,
                    programs,
                    stream,
                    frozen,
                    state,
                    step=done,
                    inspect=watch.inspect,
                    recorder=recorder,
                    interrupt=interrupt,
                )
        except StepLeftError:
            enter(done, "save")
            watch.save(state, done)
            break
        done += 1
        writer.write("train", done, values)
        writer.timing(done, seconds)
        if config.routing.verify:
            verify_routes(values, done)
        rollout_watch.check(done, values)
        state = watch.check(state, values)
        evaluate_if_due(done)
        stop = any_of("interrupt", interrupt.requested)
        if done == config.steps or stop or done % config.checkpoint.every == 0:
            enter(done, "save")
            watch.save(state, done)
        elif (emergency := config.checkpoint.emergency) is not None and done % emergency.every == 0:
            enter(done, "save in memory")
            watch.save_in_memory(state, done)
        advance(f"{_note(values)}  {_parts(seconds, compiled=done == first + 1)}".strip())
    enter(done, "last save")
    jax.block_until_ready(state)
    watch.wait()
    return state


def _parts(seconds: Mapping[str, float], *, compiled: bool) -> str:
    """Tells the seconds of a step by part; the first step compiles its programs as well."""
    names = ("rollout", "rewards", "update")
    parts = ", ".join(f"{name} {seconds[name]:.1f}" for name in names)
    return f"{sum(seconds[name] for name in names):.1f} s ({parts}{', with compilation' if compiled else ''})"


def _note(values: dict[str, float]) -> str:
    shown = {
        "reward": "reward {:.3f}",
        KL_ESTIMATE: "KL {:.4f}",
        KL_EXACT: "exact KL {:.4f}",
        "entropy": "entropy {:.3f}",
    }
    return "  ".join(text.format(values[name]) for name, text in shown.items() if name in values)
