"""One run from start to end: base, state, RL, summary."""

import errno
import sys
import time
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import jax

import kljax
from kljax._files import write_text_atomic
from train.config.errors import Note, warn
from train.config.load import LoadedConfig
from train.config.mesh import describe_mesh
from train.config.schema import Config
from train.context import RunContext
from train.distributed.compile_cache import start_compile_cache
from train.distributed.exchange import agree, on_leader, run_together
from train.distributed.peers import is_leader
from train.process.error_exit import ending_alone
from train.process.interrupt import INTERRUPTED, Interrupt, listening
from train.references.find import SavedReference
from train.references.follow import with_abstract_reference
from train.references.load import check_reference, pinned_steps, start_reference
from train.references.record import assert_unchanged, restore_record, saved_entries
from train.rl.kl_metrics import KL_METRICS
from train.rl.state import TrainState
from train.rollouts.open import open_evaluation, open_stream
from train.rollouts.stream import Stream
from train.run.base_weights import ExpectedBase, check_same_base, load_base, saved_base
from train.run.directory import RunDirectory, existing_run, flat_fields, open_run, recorded_remat
from train.run.display import (
    Start,
    default_console,
    print_comparison,
    print_devices,
    print_next_commands,
    progress,
    summary_text,
)
from train.run.guard import StepGuard
from train.run.health import serving_health
from train.run.loop import evaluate_state, train
from train.run.metrics import Metrics, open_metrics, read_metrics
from train.run.output_path import check_output
from train.run.plots import write_curves
from train.run.profile import StepTrace
from train.run.programs import Programs
from train.run.recorder import RolloutRecorder
from train.run.setup import (
    check_examples,
    check_start,
    data_digest,
    first_state,
    make_base,
    make_context,
    with_local_model,
)
from train.run.trackers import check_trackers
from train.run.user_functions import check_user_functions
from train.storage.copies import with_local_copies
from train.storage.paths import as_path
from train.weights.emergency import check_process
from train.weights.late_read_errors import quiet_abandoned_reads
from train.weights.orbax import RunCheckpoints, carried_with
from train.weights.remat import with_remat

Tree = Any
ACCURACIES = ("accuracy", "accuracy_greedy")
KLS = (*KL_METRICS, "rollout_kl")
UNMEASURED_KL = (
    "kl: no term has a coefficient, so this run measures no KL to its reference; reference.monitor=true does, with a "
    "pass of the reference over each batch"
)


def run(loaded: LoadedConfig, *, resume: bool | None = False) -> int:
    """Runs a config and returns the exit code: 0, or 130 if Ctrl-C ended it after a checkpoint.

    Args:
      loaded: the config.
      resume: whether to continue the run of this name; None: if there is one.
    """
    began = time.perf_counter()
    console = default_console()
    # Code of the user may leave the working directory.
    start = Path.cwd()
    if resume is None:
        resume = on_leader("run directory", RunDirectory.of(loaded.config).config.is_file)
    config = loaded.config
    print_devices(console, config.xla_flags)
    agree("compile_cache", config.compile_cache)
    console.print(start_compile_cache(config.compile_cache))
    config = with_local_model(config)
    # The run records the addresses; what is read from stores is read from copies.
    copied = run_together("copies", lambda: with_local_copies(config))
    quiet_abandoned_reads()
    agree("command", {**flat_fields(config), "--resume": resume, "jax": jax.__version__, "kljax": kljax.__version__})
    continued = run_together("output", lambda: _check_directory(config, resume=resume))
    if continued is not None and config.model.remat == "auto":
        # The programs of the run stay as they were, whatever memory there is now.
        remat = run_together("model.remat", lambda: recorded_remat(continued))
        config, copied = with_remat(config, remat), with_remat(copied, remat)
    context = make_context(copied)
    if context.remat is not None and context.remat.peaks:
        console.print(context.remat.line)
    if context.remat is not None:
        config = with_remat(config, context.remat.remat)
    if context.config.mesh != config.mesh:
        console.print(f"mesh: {describe_mesh(context.config.mesh.axes())}")
    stream, expected, saved = run_together("start", lambda: _prepare(context, continued))
    agree("data", {"task": data_digest(context)})
    with (
        open_run(config, resume=resume, start=start) as directory,
        jax.set_mesh(context.mesh),
        closing(stream),
        closing(
            RunCheckpoints(directory.checkpoints, config.checkpoint, pinned_steps(config), run_id=directory.run_id)
        ) as checkpoints,
        serving_health(config.report),
        ending_alone(),
        progress(console) as bars,
    ):
        shown = as_path(config.output) / directory.root.name
        console.print(f"run directory: {shown}")
        if context.held_out or config.rollout.source.type != "file":
            console.print(context.layout.line)
        base, state, writer = _begin(context, directory, checkpoints, bars, continued=resume)
        first = int(state.step)
        with closing(writer), listening() as interrupt:
            if expected is not None:
                expected.check_run(directory.root)
            state = _reinforce(
                context,
                stream,
                base,
                state,
                saved=saved,
                directory=directory,
                checkpoints=checkpoints,
                writer=writer,
                bars=bars,
                interrupt=interrupt,
            )
    done = int(state.step)
    if not is_leader():
        return 0 if done == config.steps else INTERRUPTED
    if done < config.steps:
        print(f"interrupted after step {done} of {config.steps}; saved, continue with --resume", file=sys.stderr)
        return INTERRUPTED
    before, after = _before_and_after(directory)
    skipped = _skipped_updates(config, directory)
    _draw_curves(directory)
    # A finished run that is resumed did nothing: its summary, with its seconds, stays.
    if done > first or not directory.summary.exists():
        summary = _summary(before, after, done, time.perf_counter() - began) | {"skipped_updates": skipped}
        write_text_atomic(directory.summary, summary_text(summary))
    print_comparison(console, before, after)
    if skipped:
        console.print(f"{skipped} updates were skipped")
    print_next_commands(console, shown, evaluates=bool(context.held_out))
    return 0


def _check_directory(config: Config, *, resume: bool) -> RunDirectory | None:
    """Checks the output directory, and returns that of the run that continues, or None."""
    check_output(config)
    check_trackers(config)
    return existing_run(config) if resume else None


def _prepare(
    context: RunContext, continued: RunDirectory | None
) -> tuple[Stream, ExpectedBase | None, SavedReference | None]:
    """Checks all that can be checked before anything is written, and opens the stream; no process waits for another."""
    config = context.config
    check_examples(context, before_warm_start=continued is None or saved_base(continued.root) is None)
    check_start(config, context.model)
    check_user_functions(context.plan)
    if config.checkpoint.emergency is not None:
        check_process(context.mesh)
    if not context.plan.reference:
        warn(Note(UNMEASURED_KL))
    steps = [] if continued is None else continued.steps()
    saved = check_reference(context.plan, context.model, context.mesh, steps)
    expected = check_same_base(context.plan, continued)
    return open_stream(context, continued=continued is not None), expected, saved


def _begin(
    context: RunContext, directory: RunDirectory, checkpoints: RunCheckpoints, bars: Start, *, continued: bool
) -> tuple[Tree, TrainState, Metrics]:
    """Returns base and state: of the last complete checkpoint, or new ones. The base is None without LoRA.

    The base is written when the warm start is complete; a run that was killed before starts again.
    """
    config = context.config
    model = context.model
    mesh = context.mesh
    if continued and saved_base(directory.root) is not None:
        base = load_base(directory, model, mesh)
        first = first_state(context.plan, model, mesh, base, context.optimizer)
        like = with_abstract_reference(context.plan, first)
        restored = checkpoints.restore_from_memory(like) or checkpoints.restore_last(like)
        state = first if restored is None else restored
        writer = _continue_records(config, directory, checkpoints, None if restored is None else int(state.step))
    else:
        with ExitStack() as unless_done:
            writer = unless_done.enter_context(closing(open_metrics(config, directory.root)))
            base = make_base(context, directory, bars=bars, writer=writer)
            state = first_state(context.plan, model, mesh, base, context.optimizer)
            unless_done.pop_all()
    checkpoints.carry = lambda: {"metrics": writer.mark(), "references": saved_entries(directory.reference)}
    # Without LoRA the base weights are the trainable ones, which the update donates.
    return base if config.lora is not None else None, state, writer


def _continue_records(
    config: Config, directory: RunDirectory, checkpoints: RunCheckpoints, step: int | None
) -> Metrics:
    """Continues the metrics and the record of references after a step, compared with its checkpoint or with the base.

    Raises:
      UserError: the metrics or the record are damaged.
    """
    if step is not None:
        carried = checkpoints.carried(step)
    else:
        carried = carried_with(directory.base) if directory.has_base() else {}
    on_leader("references", lambda: restore_record(directory.reference, carried.get("references", ())))
    return open_metrics(config, directory.root, -1 if step is None else step, carried.get("metrics"))


def _reinforce(
    context: RunContext,
    stream: Stream,
    base: Tree,
    state: TrainState,
    *,
    saved: SavedReference | None,
    directory: RunDirectory,
    checkpoints: RunCheckpoints,
    writer: Metrics,
    bars: Start,
    interrupt: Interrupt,
) -> TrainState:
    """Runs RL from this state, and checks at the end that the frozen part of the reference is unchanged."""
    done = int(state.step)
    stream.attach(checkpoints, done)
    evaluation = open_evaluation(context, stream) if context.held_out else None
    recorder = RolloutRecorder(context, directory.rollouts, done=done) if context.config.report.rollouts else None
    programs = Programs.of(context, state, stream.row_count, per_token=recorder is not None)
    watch = StepGuard(context.config, checkpoints, directory.nonfinite, context.tokenizer)
    if not checkpoints.steps():
        if evaluation is not None:
            evaluate_state(context, evaluation, state, base, 0, writer=writer, watch=watch, phase=bars.phase)
        watch.save(state, 0)
        watch.wait()
    frozen, state, before = start_reference(
        context.plan,
        context.model,
        context.mesh,
        state,
        base=base,
        saved=saved,
        read_base=lambda: load_base(directory, context.model, context.mesh),
        checkpoints=checkpoints,
        record=directory.reference,
    )
    trace = StepTrace(context.config.profile, directory.root, done)
    with nullcontext() if recorder is None else closing(recorder), closing(trace):
        state = train(
            context,
            programs,
            stream,
            frozen,
            state,
            evaluation=evaluation,
            writer=writer,
            watch=watch,
            interrupt=interrupt,
            advance=bars("RL", context.config.steps, done),
            phase=bars.phase,
            recorder=recorder,
            traced=trace.step,
        )
    assert_unchanged(frozen, before)
    return state


def _draw_curves(directory: RunDirectory) -> None:
    """Draws the curves; a picture that cannot be written is a warning, as the run itself is saved."""
    path = directory.root / "curves.png"
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        write_curves(directory.root)
    except OSError as error:
        warn(f"cannot write {path}: {error.strerror}")


def _before_and_after(directory: RunDirectory) -> tuple[dict[str, float], dict[str, float]]:
    """Reads the first and the last evaluation, the last with the KLs of the last training step."""
    records = read_metrics(directory.metrics)
    evaluations = [record for record in records if record["phase"] == "eval"]
    steps = [record for record in records if record["phase"] == "train"]
    last = steps[-1] if steps else {}
    measured: dict[str, float] = {name: last[name] for name in KLS if name in last}
    # The metrics of the first steps may be lost.
    first = evaluations[0] if evaluations and evaluations[0]["step"] == 0 else {}
    before, after = (
        {name: record[name] for name in ACCURACIES if name in record} for record in (first, (evaluations or [{}])[-1])
    )
    return before, after | measured


def _skipped_updates(config: Config, directory: RunDirectory) -> int:
    """Counts the updates that were skipped, by the metrics of all steps."""
    shares = [record.get("skipped_updates") or 0.0 for record in read_metrics(directory.metrics)]
    return round(sum(shares) * config.optim.updates_per_batch * config.optim.epochs)


def _summary(before: dict[str, float], after: dict[str, float], steps: int, seconds: float) -> dict[str, Any]:
    """Summarises a run; a KL that was not computed is null. `seconds` counts from the last start."""
    return {
        **{f"{name}_before": before.get(name) for name in ACCURACIES},
        **{f"{name}_after": after.get(name) for name in ACCURACIES},
        **{name: after.get(name) for name in KLS},
        "steps": steps,
        "seconds": round(seconds, 1),
    }
