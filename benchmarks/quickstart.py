"""The quickstart at several seeds, and what the KL buys where the verifier can be fooled.

    python -m benchmarks.quickstart --seeds 0 1 2 --isa SSE4_2,AVX2,AVX512 --jobs 2 --output DIR
    python -m benchmarks.quickstart --config configs/lora.yaml --isa SSE4_2,AVX2 --jobs 2 --output DIR
    python -m benchmarks.quickstart --fooled --seeds 0 --json PATH --markdown PATH --curves PATH

The first command is `make train` at each seed, compiled for each instruction set, as CPUs round differently. The
second does the same with another recipe. The third continues from the bases of the first with a verifier that can be
fooled: it accepts every number that is at least the answer. One run has KL in the loss, the other has none.

A missed target is reported, and is no failure of the command. A run that fails is.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, NamedTuple

from benchmarks.harness import cli, instructions, machine
from benchmarks.harness.process import ROOT
from benchmarks.harness.report import Report, table
from train.rl.kl_metrics import KL_ESTIMATE, KL_EXACT
from train.run.metrics import FILE_NAME, read_metrics

CONFIG = "configs/quickstart.yaml"
COST = "cost.json"

# Targets of every run: points gained and percent at the end, both of the quickstart alone; points under the best
# evaluation before, and nats per token of the KL to the reference in any step.
GAIN, ACCURACY, DROP, MAX_KL = 35.0, 95.0, 5.0, 1.0

# What the runs with the verifier that can be fooled change of the quickstart.
KL_COEF = 1
FOOLED = (
    "task=jsonl",
    "data.reward=benchmarks.quickstart:accept_at_least",
    "data.max_prompt_length=7",
    "data.max_completion_length=4",
    "reference.monitor=true",
    "steps=100",
    "optim.schedule.decay_steps=395",
    "eval.every=10",
)

COLUMNS = (
    *((title, "") for title in ("seed", "instruction set", "accuracy before", "after")),
    *(("points", "+.1f"), ("largest drop, points", ".1f"), ("largest KL of a step, nats/token", ".2f")),
    ("CPU s", ".0f"),
)
FOOLED_COLUMNS = (
    *((title, "") for title in ("seed", "run", "passes the verifier", "exactly the answer")),
    *(("entropy, nats/token", ".3f"), ("KL to the reference, nats/token", ".2f")),
)


class SeedCase(NamedTuple):
    """A seed and the newest instruction set that XLA may compile for; None: that of the CPU."""

    seed: int
    isa: str | None = None

    def directory(self, name: str) -> str:
        """Returns the name of the directory of the run `name`."""
        return "-".join([name, str(self.seed), *([self.isa] if self.isa else [])])


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A finished run: evaluations before and after RL, metrics of its last step, and the extremes on the way.

    The seconds are of all threads, compilation included. A value that was not measured or recorded is None.
    """

    label: str
    seed: int
    first: Mapping[str, Any]
    last: Mapping[str, Any]
    step: Mapping[str, Any]
    seconds: float | None = None
    cpu_seconds: float | None = None
    isa: str | None = None
    drop: float | None = None
    max_kl: float | None = None

    @property
    def gain(self) -> float:
        """Returns the percentage points of sampled held-out accuracy."""
        return self.last["accuracy"] - self.first["accuracy"]

    @property
    def case(self) -> str:
        """Returns seed and instruction set as text."""
        return " ".join([f"seed {self.seed}", *([self.isa] if self.isa else [])])

    def missed(self) -> list[str]:
        """Returns the values of the run that miss a target."""
        missed = []
        accuracy = self.last["accuracy"]
        if self.label == "quickstart":
            missed += [] if accuracy >= ACCURACY else [f"{accuracy:.1f} %"]
            missed += [] if self.gain >= GAIN else [f"{self.gain:+.1f} points"]
        missed += [] if self.drop is None or self.drop < DROP else [f"a drop of {self.drop:.1f} points"]
        missed += [] if self.max_kl is None or self.max_kl <= MAX_KL else [f"a KL of {self.max_kl:.3g} nats"]
        return missed


def accept_at_least(record: Mapping[str, Any], completion: str, finished: bool) -> dict[str, float]:
    """Rewards every number that is at least the answer; `correct` is the strict judgement, which is not trained."""
    number = int(completion) if completion.isdecimal() else -1
    return {
        "reward": float(finished and number >= int(record["answer"])),
        "correct": float(finished and completion == record["answer"]),
    }


def write_problems(directory: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes the sums of the quickstart as JSON lines; returns the file to train on and the held-out file."""
    from train.config.load import load
    from train.data.tasks import load_task

    task = load_task(load(ROOT / CONFIG).config)
    files = (directory / "train.jsonl", directory / "held_out.jsonl")
    for file, examples in zip(files, (task.train, task.eval), strict=True):
        lines = (json.dumps({"prompt": example.prompt, "answer": example.answer}) for example in examples)
        file.write_text("".join(f"{line}\n" for line in lines))
    return files


def read_records(directory: pathlib.Path, phase: str | None = None) -> list[dict[str, Any]]:
    """Reads the metrics of a run, or of one of its phases."""
    return [record for record in read_metrics(directory / FILE_NAME) if phase in (None, record["phase"])]


def kl_of(record: Mapping[str, Any]) -> float | None:
    """Returns the KL to the reference of a step: the exact one if it is there, infinite if it was not finite."""
    values = [record[name] for name in (KL_EXACT, KL_ESTIMATE) if name in record]
    return None if not values else math.inf if values[0] is None else values[0]


def run_trainer(
    directory: pathlib.Path, label: str, case: SeedCase, overrides: Sequence[str], *, config: str = CONFIG, alone: bool
) -> FinishedRun:
    """Runs the trainer's command once in a run directory; a finished run is only read, an unfinished one has no time.

    Runs beside each other share their compiled programs. Unless it runs `alone`, XLA gets one thread, output a file.
    """
    if not (directory / "summary.json").exists():
        unfinished = directory.exists()
        names = (f"name={directory.name}", f"output={directory.parent}", *(["--resume"] if unfinished else []))
        command = [sys.executable, "-m", "train", config, f"seed={case.seed}", *overrides, *names]
        settings = {"XLA_FLAGS": xla_flags(case.isa, alone=alone)}
        settings["JAX_COMPILATION_CACHE_DIR"] = str(directory.parent / "compiled")
        log = None if alone else directory.parent / f"{directory.name}.log"
        cost = _run_command(command, {**os.environ, **settings}, log)
        if not unfinished:
            (directory / COST).write_text(json.dumps(cost))
    cost = json.loads((directory / COST).read_text()) if (directory / COST).exists() else {}
    evaluations, steps = (read_records(directory, phase) for phase in ("eval", "train"))
    accuracies = [record["accuracy"] for record in evaluations]
    drop = max(best - value for best, value in zip(itertools.accumulate(accuracies, max), accuracies, strict=True))
    max_kl = max((kl for record in steps if (kl := kl_of(record)) is not None), default=None)
    extremes: dict[str, Any] = {"isa": case.isa, "drop": drop, "max_kl": max_kl}
    return FinishedRun(label, case.seed, evaluations[0], evaluations[-1], steps[-1], **cost, **extremes)


def xla_flags(isa: str | None, *, alone: bool) -> str:
    """Returns the value of XLA_FLAGS of a run: that of this process and its own."""
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_cpu_max_isa={isa}" if isa else ""]
    return " ".join(filter(None, [*flags, "" if alone else "--xla_cpu_multi_thread_eigen=false"]))


def _run_command(command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path | None) -> dict[str, float]:
    """Runs a command to its end, with its output in `log`; returns its seconds and CPU seconds."""
    shown = f"$ XLA_FLAGS='{environment['XLA_FLAGS']}' python {' '.join(command[1:])}"
    print(shown + (f" > {log}" if log else ""), file=sys.stderr, flush=True)
    began = time.perf_counter()
    with contextlib.nullcontext() if log is None else log.open("ab") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    # The CPU seconds of this child alone: others may run beside it.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"seconds": time.perf_counter() - began, "cpu_seconds": usage.ru_utime + usage.ru_stime}


def run_all(runs: Sequence[Callable[[], FinishedRun]], jobs: int) -> list[FinishedRun]:
    """Starts runs, `jobs` at a time; each of several has a core of its own, where the system can bind it."""
    can_bind = jobs > 1 and hasattr(os, "sched_setaffinity")
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)) if can_bind else [0])
    # The processes that a thread starts inherit its core.
    bind = (lambda: os.sched_setaffinity(0, {next(cores)})) if can_bind else None
    with ThreadPoolExecutor(jobs, initializer=bind) as pool:
        return list(pool.map(lambda run: run(), runs))


def run_recipe(
    output: pathlib.Path, cases: Sequence[SeedCase], *, config: str = CONFIG, jobs: int = 1
) -> list[FinishedRun]:
    """Runs a shipped config in each case; directories and labels have its name."""
    name = pathlib.Path(config).stem
    run = functools.partial(run_trainer, overrides=(), config=config, alone=jobs == 1)
    return run_all([functools.partial(run, output / case.directory(name), name, case) for case in cases], jobs)


def run_fooled(output: pathlib.Path, cases: Sequence[SeedCase], *, jobs: int = 1) -> list[FinishedRun]:
    """Runs the verifier that can be fooled from the base of the quickstart in each case, with KL and without."""
    run_recipe(output, cases, jobs=jobs)
    training, held_out = write_problems(output)
    task = (*FOOLED, f"data.train={training}", f"data.eval={held_out}")
    runs = []
    for case, (kind, coef) in itertools.product(cases, {"kl": KL_COEF, "no-kl": 0}.items()):
        base = output / case.directory("quickstart") / "base"
        changes = (*task, f"warm_start.checkpoint={base}", f"kl.loss.coef={coef}")
        named = output / case.directory(f"fooled-{kind}"), f"kl.loss.coef={coef}"
        runs.append(functools.partial(run_trainer, *named, case, changes, alone=jobs == 1))
    return run_all(runs, jobs)


def recipe_table(runs: Sequence[FinishedRun]) -> list[str]:
    """Returns a table with a row per run, and whether the targets are met."""
    rows = []
    for run in runs:
        texts = [f"{record['accuracy']:.1f} % ({record['accuracy_greedy']:.1f} %)" for record in (run.first, run.last)]
        numbers = (run.gain, run.drop, run.max_kl, run.cpu_seconds)
        rows.append([str(run.seed), run.isa or "of the CPU", *texts, *numbers])
    missed = [f"{run.case} ({', '.join(values)})" for run in runs if (values := run.missed())]
    end = f"a gain of {GAIN:g} points, {ACCURACY:g} % at the end, " if runs[0].label == "quickstart" else ""
    target = (
        f"{end}every evaluation less than {DROP:g} points under the best before, no step with a KL above {MAX_KL:g} "
        "nat per token, in each of these runs"
    )
    verdict = f"missed by {', '.join(missed)}" if missed else "met"
    return [table(COLUMNS, rows), f"Target: {target}; {verdict}."]


def fooled_table(runs: Sequence[FinishedRun]) -> list[str]:
    """Returns a table with a row per run: the reward that is trained beside the accuracy that is not."""
    rows = []
    for run in runs:
        passes = f"{100 * run.first['reward']:.1f} % -> {100 * run.last['reward']:.1f} %"
        exact = f"{run.first['accuracy']:.1f} % -> {run.last['accuracy']:.1f} %"
        rows.append([str(run.seed), f"`{run.label}`", passes, exact, run.step["entropy"], kl_of(run.step)])
    return [table(FOOLED_COLUMNS, rows)]


def report(fields: Mapping[str, Any]) -> Report:
    """Makes the table of the runs, whose labels tell a recipe from the verifier that can be fooled."""
    runs = [FinishedRun(**run) for run in fields["runs"]]
    jobs = fields.get("jobs", 1)
    beside = [f"{jobs} runs at a time, each on one core"] if jobs > 1 else []
    rows = fooled_table if runs[0].label.startswith("kl.loss.coef=") else recipe_table
    return Report(rows(runs), fields=fields, how=beside)


def draw_fooled(output: pathlib.Path, case: SeedCase, path: pathlib.Path) -> None:
    """Draws both runs of a case in the same panels."""
    from train.run.plots import Panel, draw_curves

    panels = (
        Panel("reward", "Trained: passes the verifier", "share of the rollouts"),
        Panel("accuracy", "Not trained: exactly the answer, held out", "%", "eval"),
        Panel(KL_EXACT, "KL(policy || reference)", "nats per token", log=True, instead=KL_ESTIMATE),
        Panel("entropy", "Entropy of the policy", "nats per token"),
    )
    runs = {
        f"kl.loss.coef = {KL_COEF}": read_records(output / case.directory("fooled-kl")),
        "kl.loss.coef = 0": read_records(output / case.directory("fooled-no-kl")),
    }
    draw_curves(runs, path, panels, dpi=80)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.fooled and options.config != CONFIG:
        raise cli.OptionError(f"--config: got {options.config} with --fooled, which runs {CONFIG}; set one of them")
    if lacking := instructions.lacking(options.isa):
        raise cli.OptionError(f"--isa: got {', '.join(lacking)}, which this CPU lacks")
    cli.prepare_output("--curves", options.curves)
    cases = [SeedCase(seed, isa) for seed in options.seeds for isa in options.isa or (None,)]
    fields = machine.conditions("cpu") | {"jobs": options.jobs}
    fields["versions"]["flax"] = version("flax")
    with tempfile.TemporaryDirectory() as scratch:
        output = (options.output or pathlib.Path(scratch)).absolute()
        output.mkdir(parents=True, exist_ok=True)
        if options.fooled:
            runs = run_fooled(output, cases, jobs=options.jobs)
            if options.curves:
                draw_fooled(output, cases[0], options.curves)
        else:
            runs = run_recipe(output, cases, config=options.config, jobs=options.jobs)
    return fields | {"runs": [dataclasses.asdict(run) for run in runs]}


main = cli.command(
    "quickstart",
    __doc__,
    _measure,
    report,
    cli.option("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4]),
    cli.option("--isa", type=cli.some_of(instructions.FLAGS), default=(), metavar="NAMES",
               help="of XLA's code, such as SSE4_2,AVX2; default: the CPU's"),
    cli.option("--jobs", type=cli.positive, default=1, metavar="N",
               help="runs at a time, each on one core; default: 1"),
    cli.option("--config", default=CONFIG, metavar="FILE", help=f"recipe to run; default: {CONFIG}"),
    cli.option("--fooled", action="store_true", help="the verifier that can be fooled, with KL and without"),
    cli.option("--output", type=pathlib.Path,
               help="directory of the runs, where finished ones are read; default: temporary"),
    cli.option("--curves", type=pathlib.Path, help="PNG file, with --fooled: both runs of the first seed"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
