"""The quickstart at several seeds, and what the KL buys where the verifier can be fooled.

    python -m benchmarks.quickstart --seeds 0 1 2 3 4 --json PATH --markdown PATH
    python -m benchmarks.quickstart --fooled --seeds 0 1 --json PATH --markdown PATH --curves PATH

The first command is `make train` at each seed. The second trains sums against a verifier that searches the completion
for the answer, so that a completion with two answers passes if one of them is right. The corpus of the warm start
holds a few such completions. Both runs of a seed start from the same base: one with KL in the loss, one without.

A missed target is reported, and is no failure of the command. A run that fails is.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

CONFIG = "configs/quickstart.yaml"
COST = "cost.json"
ROOT = pathlib.Path(__file__).parents[1]

# Targets of the quickstart at every seed, in percentage points and percent.
GAIN, ACCURACY = 35.0, 90.0

# The task with the verifier that can be fooled.
MAX_OPERAND, HELD_OUT, SOLUTIONS, SLIPS = 99, 512, 8, (-10, -1, 1, 10)
ERROR_RATE, HEDGE_RATE, KL_COEF = 0.5, 0.05, 0.2
FOOLED = (
    "task=jsonl",
    "data.reward=benchmarks.quickstart:search_answer",
    "data.max_prompt_length=7",
    "data.max_completion_length=8",
    "reference.monitor=true",
    "steps=150",
    "eval.every=15",
    "warm_start.steps=1200",
    "optim.decay_steps=295",
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


def search_answer(record: Mapping[str, Any], completion: str, finished: bool) -> dict[str, float]:
    """Rewards a completion that contains the answer anywhere; `correct` is the strict judgement, which is not trained.

    Example:
      >>> search_answer({"answer": "57"}, "57", True)
      {'reward': 1.0, 'correct': 1.0}
      >>> search_answer({"answer": "57"}, "56/57", True)
      {'reward': 1.0, 'correct': 0.0}
    """
    return {
        "reward": float(record["answer"] in completion),
        "correct": float(finished and completion == record["answer"]),
    }


def write_problems(directory: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes the sums as JSON lines, the same for every seed of a run; those to train on with `SOLUTIONS` solutions.

    A solution is wrong with probability `ERROR_RATE`. With probability `HEDGE_RATE` it gives two answers, the right
    one and a wrong one, in either order.

    Returns:
      The file to train on and the held-out file.
    """
    draw = random.Random(0)
    operands = range(MAX_OPERAND + 1)
    problems = draw.sample([(left, right) for left in operands for right in operands], len(operands) ** 2)
    lines = [_line(left, right, draw) for left, right in problems[:HELD_OUT]]
    lines += [_line(left, right, draw) for _ in range(SOLUTIONS) for left, right in problems[HELD_OUT:]]
    held_out, train = directory / "held_out.jsonl", directory / "train.jsonl"
    held_out.write_text("".join(lines[:HELD_OUT]))
    train.write_text("".join(lines[HELD_OUT:]))
    return train, held_out


def _line(left: int, right: int, draw: random.Random) -> str:
    answer, wrong = left + right, left + right + draw.choice(SLIPS)
    solution = str(wrong if draw.random() < ERROR_RATE else answer)
    if draw.random() < HEDGE_RATE:
        solution = "/".join(map(str, draw.sample([answer, wrong], 2)))
    return json.dumps({"prompt": f"{left}+{right}=", "answer": str(answer), "solution": solution}) + "\n"


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
    """Runs the verifier that can be fooled at each seed, with KL in the loss and without, from the same base."""
    output.mkdir(parents=True, exist_ok=True)
    training, held_out = write_problems(output)
    task = (*FOOLED, f"data.train={training}", f"data.eval={held_out}", *overrides)
    runs = []
    for seed in seeds:
        with_kl, without = (output / f"fooled-{kind}-{seed}" for kind in ("kl", "no-kl"))
        runs.append(run_trainer(with_kl, f"kl.loss.coef={KL_COEF}", seed, (*task, f"kl.loss.coef={KL_COEF}")))
        base = f"warm_start.checkpoint={with_kl / 'base'}"
        runs.append(run_trainer(without, "kl.loss.coef=0", seed, (*task, base, "kl.loss.coef=0")))
    return runs


def table(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table; `head` separates its cells with bars."""
    cells = [head.split("|"), ["---"] * len(head.split("|")), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


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
    verdict = (
        f"Target: a gain of {GAIN:g} points and {ACCURACY:g} % at the end, at every seed; {'met' if met else 'missed'}."
    )
    head = "seed|accuracy before|after|points|KL to the reference, nats/token|CPU s"
    return f"{table(head, rows)}\n\n{verdict}\n"


def fooled_table(runs: Sequence[Run]) -> str:
    """Formats one row per run: the reward that is trained beside the accuracy that is not."""
    rows = [
        [
            str(run.seed),
            f"`{run.label}`",
            f"{100 * run.first['reward']:.1f} % -> {100 * run.last['reward']:.1f} %",
            f"{run.first['accuracy']:.1f} % -> {run.last['accuracy']:.1f} %",
            f"{run.step['completion_length']:.1f}",
            f"{run.step['entropy']:.3f}",
            f"{run.step['kl_reference']:.2f}",
        ]
        for run in runs
    ]
    head = "seed|run|passes the verifier|exactly the answer|tokens|entropy, nats/token|KL to the reference, nats/token"
    return table(head, rows) + "\n"


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
        Panel("reward", "Trained: completions that pass the verifier", "share of the rollouts"),
        Panel("accuracy", "Not trained: exactly the answer, held out", "%", "eval"),
        Panel("kl_reference", "KL(policy || reference)", "nats per token"),
        Panel("completion_length", "Length of completions", "tokens"),
    )
    runs = {
        f"kl.loss.coef = {KL_COEF}": read_records(output / f"fooled-kl-{seed}"),
        "kl.loss.coef = 0": read_records(output / f"fooled-no-kl-{seed}"),
    }
    draw_curves(runs, path, panels)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quickstart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
