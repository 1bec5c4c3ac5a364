"""The quickstart at several seeds, and what the KL buys where the verifier can be fooled.

    python -m benchmarks.quickstart --seeds 0 1 2 3 4 --json PATH --markdown PATH
    python -m benchmarks.quickstart --fooled --seeds 0 --json PATH --markdown PATH --curves PATH

The first command is `make train` at each seed. The second continues from the bases of the first with a verifier that
can be fooled: it accepts every number that is at least the answer. One run has KL in the loss, the other has none.

A missed target is reported, and is no failure of the command. A run that fails is.
"""

import argparse
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

from benchmarks.harness import cli
from benchmarks.harness.report import table, text_columns

CONFIG = "configs/quickstart.yaml"
COST = "cost.json"
ROOT = pathlib.Path(__file__).parents[1]

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


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
      label: the name of the run in tables and curves.
      seed: the seed of the run.
      first: the evaluation before RL.
      last: the evaluation after RL.
      step: the metrics of the last RL step.
      seconds: time from start to end, compilation included; None if it was not measured.
      cpu_seconds: user and system time of all threads in that time; None if it was not measured.
    """

    label: str
    seed: int
    first: Mapping[str, Any]
    last: Mapping[str, Any]
    step: Mapping[str, Any]
    seconds: float | None
    cpu_seconds: float | None

    @property
    def gain(self) -> float:
        """Percentage points of sampled held-out accuracy."""
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
    evaluations = [record for record in records if record["phase"] == "eval"]
    steps = [record for record in records if record["phase"] == "train"]
    return Run(label, seed, evaluations[0], evaluations[-1], steps[-1], cost.get("seconds"), cost.get("cpu_seconds"))


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


def quickstart_table(runs: Sequence[Run]) -> str:
    """Formats one row per seed, and whether the targets are met."""
    rows = [
        [
            str(run.seed),
            f"{run.first['accuracy']:.1f} % ({run.first['accuracy_greedy']:.1f} %)",
            f"{run.last['accuracy']:.1f} % ({run.last['accuracy_greedy']:.1f} %)",
            f"{run.gain:+.1f}",
            f"{run.step['kl_reference']:.2f}",
            "-" if run.cpu_seconds is None else f"{run.cpu_seconds:.0f}",
        ]
        for run in runs
    ]
    met = all(run.gain >= GAIN and run.last["accuracy"] >= ACCURACY for run in runs)
    target = f"a gain of {GAIN:g} points and {ACCURACY:g} % at the end, at each of these seeds"
    verdict = f"Target: {target}; {'met' if met else 'missed'}."
    head = "seed|accuracy before|after|points|KL to the reference, nats/token|CPU s"
    return f"{table(text_columns(head), rows)}\n\n{verdict}\n"


def fooled_table(runs: Sequence[Run]) -> str:
    """Formats one row per run: the reward that is trained beside the accuracy that is not."""
    rows = [
        [
            str(run.seed),
            f"`{run.label}`",
            f"{100 * run.first['reward']:.1f} % -> {100 * run.last['reward']:.1f} %",
            f"{run.first['accuracy']:.1f} % -> {run.last['accuracy']:.1f} %",
            f"{run.step['entropy']:.3f}",
            f"{run.step['kl_reference']:.2f}",
        ]
        for run in runs
    ]
    head = "seed|run|passes the verifier|exactly the answer|entropy, nats/token|KL to the reference, nats/token"
    return table(text_columns(head), rows) + "\n"


def describe_machine() -> dict[str, str]:
    """Describes the machine and the versions of the libraries."""
    import jax

    from benchmarks.harness import machine

    found = {name: str(value) for name, value in machine.describe(jax.devices("cpu")[0]).items() if value}
    flags = {"flags": os.environ["XLA_FLAGS"]} if os.environ.get("XLA_FLAGS") else {}
    return found | {"jax": jax.__version__, "flax": version("flax"), "commit": machine.commit() or "", **flags}


def heading(machine: Mapping[str, str]) -> str:
    """Formats when and where the table was measured."""
    where = ", ".join(machine[name] for name in ("processor", "cores", "memory", "system") if name in machine)
    flags = f", `XLA_FLAGS={machine['flags']}`" if "flags" in machine else ""
    return f"{machine['date']} on {where}; jax {machine['jax']}, flax {machine['flax']}{flags}."


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


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = cli.make_parser("quickstart", __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--fooled", action="store_true", help="the verifier that can be fooled, with KL and without")
    parser.add_argument(
        "--output", type=pathlib.Path, help="directory of the runs, where finished ones are read; default: temporary"
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for the measurements")
    parser.add_argument("--markdown", type=pathlib.Path, help="file for the table")
    parser.add_argument("--curves", type=pathlib.Path, help="with --fooled: PNG file with both runs of the first seed")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the config")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.curves and not options.fooled:
        parser.error("--curves: only with --fooled; each run of the quickstart draws its own curves.png")
    with tempfile.TemporaryDirectory() as scratch:
        output = (options.output or pathlib.Path(scratch)).absolute()
        runs = (run_fooled if options.fooled else run_quickstart)(output, options.seeds, options.set)
        if options.curves:
            draw_fooled(output, options.seeds[0], options.curves)
    machine = describe_machine()
    text = f"{heading(machine)}\n\n{(fooled_table if options.fooled else quickstart_table)(runs)}"
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        report = {"machine": machine, "overrides": options.set, "runs": [dataclasses.asdict(run) for run in runs]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
