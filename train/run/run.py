"""One run from beginning to end: the base, the state, RL, the summary."""

import dataclasses
import sys
import time
from contextlib import closing
from typing import Any

import jax

from train.config.load import LoadedConfig
from train.config.schema import Config
from train.data.prompts import Prompts, keep_prompts
from train.data.tasks import load_task
from train.data.tokenizers import load_tokenizer
from train.references import assert_unchanged, begin_reference, check_reference, pinned_steps, with_place
from train.references.same_base import check_same_base
from train.rl.state import TrainState
from train.rl.step import make_optimizer
from train.rl.tracing import forget_traces
from train.rollouts import Source, open_source
from train.run.check_examples import check_examples
from train.run.console import quiet_orbax
from train.run.directory import RunDirectory, resume_run, start_run
from train.run.interrupt import Interrupt, listening
from train.run.loop import Programs, train, write_evaluation
from train.run.metrics import MetricsWriter, read_metrics
from train.run.plots import write_curves
from train.run.report import Start, default_console, print_comparison, progress, write_summary
from train.run.setting import Setting
from train.run.setup import check_start, config_mesh, first_state, has_base, make_model, new_base, restored_base
from train.weights.abandoned_reads import quiet_abandoned_reads
from train.weights.checkpoint import Checkpoints

Tree = Any
INTERRUPTED = 130
ACCURACIES = ("accuracy", "accuracy_greedy")
KLS = ("kl_reference", "kl_reference_exact", "rollout_kl")


@quiet_orbax()
def run(loaded: LoadedConfig, *, resume: bool = False) -> int:
    """Runs a config; returns the exit code: 0, or 130 if Ctrl-C ended it after a checkpoint."""
    config, began, console = loaded.config, time.perf_counter(), default_console()
    forget_traces()
    quiet_abandoned_reads()
    setting = make_setting(config)
    check_examples(setting, imitates=not (resume and has_base(RunDirectory.of(config))))
    check_start(config, setting.model)
    check_reference(config, setting.model, setting.mesh, RunDirectory.of(config).steps() if resume else [])
    expected = check_same_base(config, RunDirectory.of(config) if resume else None)
    source = open_source(setting, continued=resume)
    directory = resume_run(config) if resume else start_run(config)
    console.print(f"run directory: {directory.root}", markup=False, highlight=False)
    with (
        jax.set_mesh(setting.mesh),
        closing(source),
        closing(Checkpoints(directory.checkpoints, config.checkpoint, pinned_steps(config))) as checkpoints,
        progress(console) as bars,
    ):
        setting, state, writer = _begin(setting, directory, checkpoints, bars, continued=resume)
        first = int(state.step)
        with closing(writer), listening() as interrupt:
            if expected is not None:
                expected.check_run(directory.root)
            state = _reinforce(
                setting,
                source,
                state,
                directory=directory,
                checkpoints=checkpoints,
                writer=writer,
                bars=bars,
                interrupt=interrupt,
            )
    done = int(state.step)
    if done < config.steps:
        print(f"interrupted after step {done} of {config.steps}; saved, continue with --resume", file=sys.stderr)
        return INTERRUPTED
    before, after = _before_and_after(directory)
    write_curves(directory.root)
    # A finished run that is asked to continue did nothing now: its summary, with its seconds, stays.
    if done > first or not directory.summary.exists():
        write_summary(directory.summary, _summary(before, after, done, time.perf_counter() - began))
    print_comparison(console, before, after)
    return 0


def make_setting(config: Config) -> Setting:
    """What the run needs of the config and the machine; every mistake that can be found here is found before RL."""
    tokenizer, task = load_tokenizer(config), load_task(config)
    prompts = Prompts(
        task.train,
        tokenizer,
        length=config.data.max_prompt_length,
        batch_size=config.rollout.prompts_per_step,
        seed=config.seed,
    )
    held_out = keep_prompts(task.eval, tokenizer, config.data.max_prompt_length, what="held-out prompts")
    return Setting(
        config=config,
        mesh=config_mesh(config),
        model=make_model(config, tokenizer),
        optimizer=make_optimizer(config.optim),
        tokenizer=tokenizer,
        task=task,
        prompts=prompts,
        held_out=held_out[: config.eval.prompts],
    )


def _begin(
    setting: Setting, directory: RunDirectory, checkpoints: Checkpoints, bars: Start, *, continued: bool
) -> tuple[Setting, TrainState, MetricsWriter]:
    """The base and the state to go on from: of the last complete checkpoint, or from the start.

    The base is written once the warm start is complete; a run that was killed before begins anew.
    """
    config, model, mesh = setting.config, setting.model, setting.mesh
    if continued and has_base(directory):
        base = restored_base(directory, model, mesh)
        first = first_state(config, model, mesh, base, setting.optimizer)
        restored = checkpoints.restore_last(with_place(config, first))
        state = first if restored is None else restored
        writer = MetricsWriter(directory.root, resume_step=-1 if restored is None else int(state.step))
    else:
        writer = MetricsWriter(directory.root)
        base = new_base(setting, directory, bars=bars, writer=writer)
        state = first_state(config, model, mesh, base, setting.optimizer)
    # Without LoRA the base weights are the trainable ones, whose buffers the update gives away.
    return dataclasses.replace(setting, base=base if config.lora is not None else None), state, writer


def _reinforce(
    setting: Setting,
    source: Source,
    state: TrainState,
    *,
    directory: RunDirectory,
    checkpoints: Checkpoints,
    writer: MetricsWriter,
    bars: Start,
    interrupt: Interrupt,
) -> TrainState:
    """RL from this state on, against a reference of which what should stay is proven unchanged at the end."""
    programs = Programs.of(setting, state)
    if not checkpoints.steps():
        write_evaluation(setting, programs, state, writer, 0)
        checkpoints.save(state, 0)
        checkpoints.wait()
    reference, state, before = begin_reference(
        setting.config,
        setting.model,
        setting.mesh,
        state,
        base=setting.base,
        read_base=lambda: restored_base(directory, setting.model, setting.mesh),
        checkpoints=checkpoints,
        record=directory.reference,
    )
    state = train(
        dataclasses.replace(setting, reference=reference),
        programs,
        source,
        state,
        writer=writer,
        checkpoints=checkpoints,
        interrupt=interrupt,
        advance=bars("RL", setting.config.steps, int(state.step)),
    )
    assert_unchanged(reference, before)
    return state


def _before_and_after(directory: RunDirectory) -> tuple[dict[str, float], dict[str, float]]:
    """The first and the last evaluation, the latter with the KLs of the last training step."""
    records = read_metrics(directory.metrics)
    evaluations = [record for record in records if record["phase"] == "eval"]
    steps = [record for record in records if record["phase"] == "train"]
    last = steps[-1] if steps else {}
    measured: dict[str, float] = {name: last[name] for name in KLS if name in last}
    before, after = ({name: record[name] for name in ACCURACIES} for record in (evaluations[0], evaluations[-1]))
    return before, after | measured


def _summary(before: dict[str, float], after: dict[str, float], steps: int, seconds: float) -> dict[str, Any]:
    """What a run is judged by; a KL that was not computed is null. `seconds` is the time since the last start."""
    return {
        **{f"{name}_before": before[name] for name in ACCURACIES},
        **{f"{name}_after": after[name] for name in ACCURACIES},
        "kl_reference": after.get("kl_reference"),
        "rollout_kl": after.get("rollout_kl"),
        "steps": steps,
        "seconds": round(seconds, 1),
    }
