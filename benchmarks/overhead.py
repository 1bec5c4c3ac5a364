"""Times what logging, checkpoints, a verifier and a server add to a step of the trainer, on a CPU.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --rounds 20 --json PATH --markdown PATH
    python -m benchmarks.overhead --recorded

One run of the trainer's loop takes turns: steps that write nothing, steps that write metrics, a step that also saves
the state, the step after it, during which the files are written, and a step whose verifier takes a tenth of a step.
Then a server whose answer takes as long as an update, which waits for the trainer, or works one step ahead of it.
With --recorded, steps with recorded completions alone, whose reference scores each row once, or in every epoch.

Each row is compared with the plain steps of its round, and the median of the rounds counts: by wall time, by the CPU
time of all threads, and by the time that the loop spends in writing, for which the devices wait. Curves are drawn when
a run has ended, so they are in no step. A missed target does not fail the command.
"""

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from benchmarks.harness import cli, machine
from benchmarks.harness.report import conditions, join, table, targets, text_columns
from benchmarks.harness.results import Check
from benchmarks.suites.overhead import recorded, server, steps
from benchmarks.suites.overhead.problem import QUICK, Work

STALL, VERIFIED, SERVER = 1.02, 1.02, 1.15
"""Targets: a step over one without writing, without a verifier, and over the longer of update and answer."""
TITLES = {
    "plain": "nothing is written",
    "logged": "metrics are written",
    "saved": "and the state is saved",
    "after": "the step after the save",
    "verified": "a verifier takes a tenth of the step",
}
COLUMNS = (
    *text_columns("step"),
    ("s", ".3f"),
    ("over nothing", ".3f"),
    ("CPU s", ".3f"),
    ("over nothing", ".3f"),
    ("s in writing", ".4f"),
)
RECORDED_COLUMNS = (*text_columns("recorded completions"), ("s", ".3f"), ("over every epoch", ".2f"),
                    ("CPU s", ".3f"), ("over every epoch", ".2f"))  # fmt: skip
SERVER_COLUMNS = (*text_columns("with a server"), ("s", ".3f"), ("over the longer of both", ".2f"))


def ratios(report: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Returns the medians over the rounds of each kind of step over the plain ones of its round.

    By wall time, by CPU time, and by the time that the loop spent in writing over the rest of the step.
    """
    means = _means(report)
    return {
        kind: (
            _median(one[kind][0] / one["plain"][0] for one in means),
            _median(one[kind][1] / one["plain"][1] for one in means),
            1 + _median(one[kind][2] / (one[kind][0] - one[kind][2]) for one in means),
        )
        for kind in TITLES
    }


def server_ratios(report: Mapping[str, Any]) -> dict[str, float]:
    """Returns the median over the rounds of a step with a server over the longer of its answer and its update.

    Both are parts of the steps of the round that wait for each other.
    """
    return {
        name: _median(one[name]["step"] / max(one["ahead: 0"][part] for part in ("answer", "update"))
                      for one in report["server"])
        for name in server.CONTENDERS
    }  # fmt: skip


def checks(report: Mapping[str, Any]) -> list[Check]:
    """Compares the measurements with the targets.

    The loop's own time in writing is compared, which other programs on the machine prolong as they prolong the step;
    the other value is that of the wall time of whole steps.
    """
    found = ratios(report)
    stalls = [
        Check(title, STALL, found[kind][2], found[kind][0], digits=3)
        for title, kind in (("metrics in every step", "logged"), ("the step that saves the state", "saved"))
    ]
    verified = Check("a verifier of a tenth of the step", VERIFIED, found["verified"][0], digits=3)
    return [*stalls, verified, Check("a server one step ahead", SERVER, server_ratios(report)["ahead: 1"])]


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the conditions, the tables and the targets."""
    means, found, served = _means(report), ratios(report), server_ratios(report)
    rows = [
        [title, *(_median(one[kind][0] for one in means), found[kind][0]),
         *(_median(one[kind][1] for one in means), found[kind][1]), _median(one[kind][2] for one in means)]
        for kind, title in TITLES.items()
    ]  # fmt: skip
    alone = [[f"the {part} alone", _median(one["ahead: 0"][part] for one in report["server"]), None]
             for part in ("answer", "update")]  # fmt: skip
    steps_with = [
        [f"a step with `{name}`", _median(one[name]["step"] for one in report["server"]), ratio]
        for name, ratio in served.items()
    ]
    work = Work(**report["work"])
    how = [
        f"{work.rows} completions of {work.completion_length} tokens, a width of {work.width}",
        f"a state of {report['bytes'] / 1e6:.1f} MB",
        f"medians of {report['rounds']} interleaved rounds",
    ]
    return join(
        [
            *conditions(report, how),
            table(COLUMNS, rows),
            table(SERVER_COLUMNS, [*alone, *steps_with]),
            targets(checks(report), "whole steps"),
        ]
    )


def recorded_markdown(report: Mapping[str, Any]) -> str:
    """Returns the conditions and the table of the steps with recorded completions."""
    work, rounds, rows = Work(**report["work"]), report["recorded"], list[list[Any]]()
    for updates in recorded.UPDATES:
        once, every = (recorded.title(updates, kept) for kept in recorded.KEPT)
        for name in (once, every):
            values = (
                value
                for clock in range(2)
                for value in (
                    _median(one[name][clock] for one in rounds),
                    _median(one[name][clock] / one[every][clock] for one in rounds),
                )
            )
            rows.append([name, *values])
    how = [
        f"{work.rows} completions of {work.completion_length} tokens, a width of {work.width}",
        f"medians of {report['rounds']} interleaved rounds after the first epoch",
    ]
    return join([*conditions(report, how), table(RECORDED_COLUMNS, rows)])


def _means(report: Mapping[str, Any]) -> list[dict[str, tuple[float, ...]]]:
    """Returns the mean seconds of each kind of step for each round: wall, CPU, and in writing."""
    return [
        {kind: tuple(map(statistics.mean, zip(*values, strict=True))) for kind, values in one.items()}
        for one in report["steps"]
    ]


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = cli.make_parser("overhead", __doc__)
    parser.add_argument("--rounds", type=cli.positive, default=12, help="interleaved rounds; the median counts")
    parser.add_argument("--recorded", action="store_true", help="time the steps with recorded completions alone")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a tiny model")
    cli.add_outputs(parser)
    options = parser.parse_args(arguments)
    work = Work(**QUICK) if options.quick else Work()
    before = machine.load()
    if options.recorded:
        found: dict[str, Any] = {"recorded": recorded.measure(work, options.rounds)}
    else:
        seconds, size = steps.measure(work, options.rounds)
        found = {"bytes": size, "steps": seconds, "server": server.measure(work, options.rounds)}
    report = {
        "machine": machine.describe(jax.devices()[0]),
        "versions": {"kljax": machine.release(), "jax": jax.__version__},
        "rounds": options.rounds,
        "load": [before, machine.load()],
        "work": {name: getattr(work, name) for name in Work.__dataclass_fields__},
        **found,
    }
    if options.recorded:
        return cli.finish(options, recorded_markdown(report), report, [])
    report["targets"] = [check.as_json() for check in checks(report)]
    return cli.finish(options, markdown(report), report, [])


if __name__ == "__main__":
    sys.exit(main())
