"""Runs of configs/real.yaml beside one another: a table, and the curves of what the KL buys.

    python -m tests.real.runs runs/s0-AVX2 runs/s0-AVX512 ...
    python -m tests.real.runs "with the KL=runs/kl" "without=runs/no-kl" --curves docs/images/real.png

A run is named by its directory, or by the text before `=`.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from train.process.console import run_command
from train.rl.kl_metrics import KL_EXACT
from train.run.metrics import FILE_NAME, read_metrics
from train.run.plots import Panel, draw_curves

COLUMNS = ("run", "sampled", "greedy", "reply ends", "answer anywhere", "largest KL of a step", "last KL")
PANELS = (
    Panel("correct", "Right: the reply ends, and its last number is the answer", "share of the rollouts"),
    Panel("anywhere", "The answer is anywhere in the reply", "share of the rollouts"),
    Panel(KL_EXACT, "KL(policy || base), exact", "nats per token", log=True),
    Panel("completion_length", "Length of a reply", "tokens"),
)
Records = Sequence[Mapping[str, Any]]


class NamedRun(NamedTuple):
    """The label of a run and its metrics."""

    label: str
    records: Records

    @classmethod
    def of(cls, text: str) -> "NamedRun":
        """Reads the run of `LABEL=DIRECTORY` or `DIRECTORY`."""
        label, separator, directory = text.rpartition("=")
        return cls(label if separator else Path(directory).name, read_metrics(Path(directory) / FILE_NAME))

    def row(self) -> list[str]:
        """Returns the cells of the table: held-out percentages before and after, and KLs in nats per token."""
        evaluations = [record for record in self.records if record["phase"] == "eval"]
        kls = [record[KL_EXACT] for record in self.records if record["phase"] == "train"]
        percent = {"accuracy": 1, "accuracy_greedy": 1, "ended": 100, "anywhere": 100}
        ends = [
            " to ".join(f"{scale * record[name]:.1f}" for record in (evaluations[0], evaluations[-1])) + " %"
            for name, scale in percent.items()
        ]
        return [self.label, *ends, f"{max(kls):.2f}", f"{kls[-1]:.2f}"]


def table(runs: Sequence[NamedRun]) -> str:
    """Returns a table in Markdown with a row for each run."""
    rows = [COLUMNS, ["---", *["--:"] * (len(COLUMNS) - 1)], *(run.row() for run in runs)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is 0, or 2 for an error that the user can fix."""
    command = argparse.ArgumentParser(prog="python -m tests.real.runs", description=str(__doc__).partition("\n")[0])
    command.add_argument("runs", metavar="[LABEL=]RUN", nargs="+", help="directory of a run of configs/real.yaml")
    command.add_argument("--curves", metavar="PNG", type=Path, help="draw the runs into this file")
    options = command.parse_args(arguments)

    def run() -> None:
        runs = [NamedRun.of(text) for text in options.runs]
        print(table(runs))
        if options.curves is not None:
            draw_curves(dict(runs), options.curves, PANELS, dpi=80)

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
