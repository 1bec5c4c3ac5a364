"""The quickstart at several seeds, and what the KL buys where the verifier can be fooled.

    python -m benchmarks.quickstart --seeds 0 1 2 3 4 --json PATH --markdown PATH
    python -m benchmarks.quickstart --fooled --seeds 0 --json PATH --markdown PATH --curves PATH

The first command is `make train` at each seed. The second continues from the bases of the first with a verifier that
can be fooled: it accepts every number that is at least the answer. One run has KL in the loss, the other has none.

A missed target is reported, and is no failure of the command. A run that fails is.
"""

import dataclasses
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax

from benchmarks.harness import cli, machine
from benchmarks.harness.process import ROOT
from benchmarks.harness.report import join, table, text_columns, where

CONFIG = "configs/quickstart.yaml"
COST = "cost.json"

# Targets of the quickstart at every seed, in percentage points and percent.
GAIN, ACCURACY = 35.0, 90.0

# What the runs with the verifier that can be fooled change of the quickstart.
KL_COEF = 1
FOOLED = (
    "task=jsonl",
    "data.reward=benchmarks.quickstart:accept_at_least",
    "data.max_prompt_length=7",
    "data.max_completion_length=4",
    "reference.monitor=true",
    "steps=100",
    "optim.schedule.decay_steps=195",
    "eval.every=10",
)


COLUMNS = (
    *text_columns("seed|accuracy before|after"),
    *(("points", "+.1f"), ("KL to the reference, nats/token", ".2f"), ("CPU s", ".0f")),
)
FOOLED_COLUMNS = (
    *text_columns("seed|run|passes the verifier|exactly the answer"),
    *(("entropy, nats/token", ".3f"), ("KL to the reference, nats/token", ".2f")),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
      label: in tables and curves.
      first, last: the evaluations before and after RL; step: the metrics of the last RL step.
      seconds, cpu_seconds: of the whole run and all its threads, compilation included; None if not measured.
    """

    label: str
    seed: int
    first: Mapping[str, Any]
    last: Mapping[str, Any]
    step: Mapping[str, Any]
    seconds: float | None = None
    cpu_seconds: float | None = None

    @property
    def gain(self) -> float:
        """Returns the percentage points of sampled held-out accuracy."""
        return self.last["accuracy"] - self.first["accuracy"]


def accept_at_least(record: Mapping[str, Any], completion: str, finished: bool) -> dict[str, float]:
    """Rewards every number that is at least the answer; `correct` is the strict judgement, which is not trained.

    Example:
      >>> accept_at_least({"answer": "57"}, "57", True)
      {'reward': 1.0, 'correct': 1.0}
      >>> accept_at_least({"answer": "57"}, "99", True)
      {'reward': 1.0, 'correct': 0.0}
    """
    number = int(completion) if completion.isdecimal() else -1
    return {
        "reward": float(finished and number >= int(record["answer"])),
        "correct": float(finished and completion == record["answer"]),
    }


def write_problems(directory: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes the sums of the quickstart as JSON lines.

    Returns:
      The file to train on and the held-out file.
    """
    from train.config.load import load
    from train.data.tasks import load_task

    task = load_task(load(ROOT / CONFIG).config)
    files = (directory / "train.jsonl", directory / "held_out.jsonl")
    for file, examples in zip(files, (task.train, task.eval), strict=True):
        lines = (json.dumps({"prompt": example.prompt, "answer": example.answer}) for example in examples)
        file.write_text("".join(f"{line}\n" for line in lines))
    return files


def read_records(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the metrics of a run."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def run_trainer(directory: pathlib.Path, label: str, seed: int, overrides: Sequence[str]) -> Run:
    """Runs the trainer's command once, with `directory` as its run directory; a finished run is only read.

    Runs beside each other share their compiled programs, so the time of the first run alone is that of a user.

    Raises:
      subprocess.CalledProcessError: the command failed.
    """
    if not (directory / "summary.json").exists():
        place = (f"name={directory.name}", f"output={directory.parent}")
        command = [sys.executable, "-m", "train", CONFIG, f"seed={seed}", *overrides, *place]
        print("$ python " + " ".join(command[1:]), file=sys.stderr, flush=True)
        cache = {"JAX_COMPILATION_CACHE_DIR": str(directory.parent / "compiled")}
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **cache})
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        (directory / COST).write_text(json.dumps({"seconds": seconds, "cpu_seconds": cpu}))
    cost = json.loads((directory / COST).read_text()) if (directory / COST).exists() else {}
    records = read_records(directory)
    evaluations, steps = ([record for record in records if record["phase"] == phase] for phase in ("eval", "train"))
    return Run(label, seed, evaluations[0], evaluations[-1], steps[-1], **cost)


def run_quickstart(output: pathlib.Path, seeds: Sequence[int], overrides: Sequence[str]) -> list[Run]:
    """Runs the shipped config at each seed."""
    return [run_trainer(output / f"quickstart-{seed}", "quickstart", seed, overrides) for seed in seeds]


def run_fooled(output: pathlib.Path, seeds: Sequence[int], overrides: Sequence[str]) -> list[Run]:
    """Runs the verifier that can be fooled from the base of the quickstart at each seed, with KL and without."""
    bases = [output / f"quickstart-{run.seed}" / "base" for run in run_quickstart(output, seeds, overrides)]
    training, held_out = write_problems(output)
    task = (*FOOLED, f"data.train={training}", f"data.eval={held_out}", *overrides)
    runs = []
    for seed, base in zip(seeds, bases, strict=True):
        for kind, coef in (("kl", KL_COEF), ("no-kl", 0)):
            changes = (*task, f"warm_start.checkpoint={base}", f"kl.loss.coef={coef}")
            runs.append(run_trainer(output / f"fooled-{kind}-{seed}", f"kl.loss.coef={coef}", seed, changes))
    return runs


def quickstart_table(runs: Sequence[Run]) -> list[str]:
    """Returns a table with a row per seed, and whether the targets are met."""

    def accuracy(record: Mapping[str, Any]) -> str:
        return f"{record['accuracy']:.1f} % ({record['accuracy_greedy']:.1f} %)"

    rows = [
        [str(run.seed), accuracy(run.first), accuracy(run.last), run.gain, run.step["kl_reference"], run.cpu_seconds]
        for run in runs
    ]
    met = all(run.gain >= GAIN and run.last["accuracy"] >= ACCURACY for run in runs)
    target = f"a gain of {GAIN:g} points and {ACCURACY:g} % at the end, at each of these seeds"
    return [table(COLUMNS, rows), f"Target: {target}; {'met' if met else 'missed'}."]


def fooled_table(runs: Sequence[Run]) -> list[str]:
    """Returns a table with a row per run: the reward that is trained beside the accuracy that is not."""
    rows = []
    for run in runs:
        passes = f"{100 * run.first['reward']:.1f} % -> {100 * run.last['reward']:.1f} %"
        exact = f"{run.first['accuracy']:.1f} % -> {run.last['accuracy']:.1f} %"
        rows.append([str(run.seed), f"`{run.label}`", passes, exact, run.step["entropy"], run.step["kl_reference"]])
    return [table(FOOLED_COLUMNS, rows)]


def markdown(report: Mapping[str, Any], runs: Sequence[Run], *, fooled: bool) -> str:
    """Returns when and where the runs were measured, and their table."""
    return join([where(report), *(fooled_table if fooled else quickstart_table)(runs)])


def draw_fooled(output: pathlib.Path, seed: int, path: pathlib.Path) -> None:
    """Draws both runs of a seed in the same panels."""
    from train.run.plots import Panel, draw_curves

    panels = (
        Panel("reward", "Trained: passes the verifier", "share of the rollouts"),
        Panel("accuracy", "Not trained: exactly the answer, held out", "%", "eval"),
        Panel("kl_reference", "KL(policy || reference)", "nats per token"),
        Panel("entropy", "Entropy of the policy", "nats per token"),
    )
    runs = {
        f"kl.loss.coef = {KL_COEF}": read_records(output / f"fooled-kl-{seed}"),
        "kl.loss.coef = 0": read_records(output / f"fooled-no-kl-{seed}"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_curves(runs, path, panels, dpi=80)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = cli.make_parser("quickstart", __doc__)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    add("--fooled", action="store_true", help="the verifier that can be fooled, with KL and without")
    add("--output", type=pathlib.Path, help="directory of the runs, where finished ones are read; default: temporary")
    add("--curves", type=pathlib.Path, help="with --fooled: PNG file with both runs of the first seed")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the config")
    cli.add_outputs(parser)
    options = parser.parse_args(arguments)
    if options.curves and not options.fooled:
        parser.error("--curves: only with --fooled; each run of the quickstart draws its own curves.png")
    with tempfile.TemporaryDirectory() as scratch:
        output = (options.output or pathlib.Path(scratch)).absolute()
        runs = (run_fooled if options.fooled else run_quickstart)(output, options.seeds, options.set)
        if options.curves:
            draw_fooled(output, options.seeds[0], options.curves)
    versions = {"kljax": machine.release(), "jax": jax.__version__, "flax": version("flax")}
    report = {"machine": machine.describe(jax.devices("cpu")[0]), "versions": versions, "overrides": options.set}
    text = markdown(report, runs, fooled=options.fooled)
    return cli.finish(options, text, {**report, "runs": [dataclasses.asdict(run) for run in runs]}, [])


if __name__ == "__main__":
    sys.exit(main())
