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

import argparse
import sys
from collections.abc import Mapping
from statistics import mean, median
from typing import Any

import jax

from benchmarks.harness import cli, machine
from benchmarks.harness.report import Report, conditions, join, table, targets
from benchmarks.harness.results import Check
from benchmarks.suites.overhead import recorded, server, steps
from benchmarks.suites.overhead.problem import QUICK, StepSizes

STALL, VERIFIED, SERVER = 1.02, 1.02, 1.15
"""Targets: a step over one without writing, without a verifier, and over the longer of update and answer."""
TITLES = {
    "plain": "nothing is written",
    "logged": "metrics are written",
    "saved": "and the state is saved",
    "after": "the step after the save",
    "verified": "a verifier takes a tenth of the step",
}
COLUMNS = (("step", ""), ("s", ".3f"), ("over nothing", ".3f"), ("CPU s", ".3f"), ("over nothing", ".3f"),
           ("s in writing", ".4f"))  # fmt: skip
RECORDED_COLUMNS = (("recorded completions", ""), ("s", ".3f"), ("over every epoch", ".2f"), ("CPU s", ".3f"),
                    ("over every epoch", ".2f"))  # fmt: skip
SERVER_COLUMNS = (("with a server", ""), ("s", ".3f"), ("over the longer of both", ".2f"))


def ratios(fields: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Returns the medians over the rounds of each kind of step over the plain ones of its round.

    By wall time, by CPU time, and by the time that the loop spent in writing over the rest of the step.
    """
    means = _means(fields)
    return {
        kind: (
            median(one[kind][0] / one["plain"][0] for one in means),
            median(one[kind][1] / one["plain"][1] for one in means),
            1 + median(one[kind][2] / (one[kind][0] - one[kind][2]) for one in means),
        )
        for kind in TITLES
    }


def server_ratio(fields: Mapping[str, Any], name: str) -> float:
    """Returns the median over the rounds of a step with a server over the longer of its answer and its update.

    Both are parts of the steps of the round that wait for each other.
    """
    return median(
        one[name]["step"] / max(one["ahead: 0"]["answer"], one["ahead: 0"]["update"]) for one in fields["server"]
    )


def checks(fields: Mapping[str, Any]) -> list[Check]:
    """Compares the measurements with the targets.

    The loop's own time in writing is compared, which other programs on the machine prolong as they prolong the step;
    the other value is that of the wall time of whole steps.
    """
    of_kind = ratios(fields)
    stalls = [
        Check(title, STALL, of_kind[kind][2], of_kind[kind][0], digits=3)
        for title, kind in (("metrics in every step", "logged"), ("the step that saves the state", "saved"))
    ]
    verified = Check("a verifier of a tenth of the step", VERIFIED, of_kind["verified"][0], digits=3)
    return [*stalls, verified, Check("a server one step ahead", SERVER, server_ratio(fields, "ahead: 1"))]


def markdown(fields: Mapping[str, Any]) -> str:
    """Returns the conditions, the tables and the targets."""
    means, of_kind, rounds = _means(fields), ratios(fields), fields["server"]
    rows = []
    for kind, title in TITLES.items():
        wall, cpu, writing = (median(one[kind][clock] for one in means) for clock in range(3))
        rows.append([title, wall, of_kind[kind][0], cpu, of_kind[kind][1], writing])
    served: list[list[Any]] = [
        [f"the {part} alone", median(one["ahead: 0"][part] for one in rounds), None] for part in ("answer", "update")
    ]
    for name in server.CONTENDERS:
        seconds = median(one[name]["step"] for one in rounds)
        served.append([f"a step with `{name}`", seconds, server_ratio(fields, name)])
    how = [*_how(fields), f"a state of {fields['bytes'] / 1e6:.1f} MB"]
    how.append(f"medians of {fields['rounds']} interleaved rounds")
    tables = [table(COLUMNS, rows), table(SERVER_COLUMNS, served), targets(checks(fields), "whole steps")]
    return join([*conditions(fields, how), *tables])


def recorded_markdown(fields: Mapping[str, Any]) -> str:
    """Returns the conditions and the table of the steps with recorded completions."""
    rounds, rows = fields["recorded"], list[list[Any]]()
    for updates in recorded.UPDATES:
        once, every = (recorded.title(updates, kept) for kept in recorded.KEPT)
        for name in (once, every):
            rows.append([name])
            for clock in range(2):
                rows[-1].append(median(one[name][clock] for one in rounds))
                rows[-1].append(median(one[name][clock] / one[every][clock] for one in rounds))
    how = [*_how(fields), f"medians of {fields['rounds']} interleaved rounds after the first epoch"]
    return join([*conditions(fields, how), table(RECORDED_COLUMNS, rows)])


def _how(fields: Mapping[str, Any]) -> list[str]:
    work = StepSizes(**fields["work"])
    return [f"{work.rows} completions of {work.completion_length} tokens, a width of {work.width}"]


def _means(fields: Mapping[str, Any]) -> list[dict[str, tuple[float, ...]]]:
    """Returns the mean seconds of each kind of step for each round: wall, CPU, and in writing."""
    return [
        {kind: tuple(map(mean, zip(*values, strict=True))) for kind, values in one.items()} for one in fields["steps"]
    ]


def _report(options: argparse.Namespace) -> Report:
    work, before = StepSizes(**QUICK) if options.quick else StepSizes(), machine.load()
    if options.recorded:
        measured: dict[str, Any] = {"recorded": recorded.measure(work, options.rounds)}
    else:
        seconds, size = steps.measure(work, options.rounds)
        measured = {"bytes": size, "steps": seconds, "server": server.measure(work, options.rounds)}
    fields = {
        "machine": machine.describe(jax.devices()[0]),
        "versions": machine.versions(),
        "rounds": options.rounds,
        "load": [before, machine.load()],
        "work": vars(work),
        **measured,
    }
    if options.recorded:
        return Report(fields, recorded_markdown(fields))
    fields["targets"] = [check.as_json() for check in checks(fields)]
    return Report(fields, markdown(fields))


main = cli.command(
    "overhead",
    __doc__,
    _report,
    cli.rounds(12),
    cli.option("--recorded", action="store_true", help="time the steps with recorded completions alone"),
    cli.option("--quick", action="store_true", help="a smoke test: a tiny model"),
)

if __name__ == "__main__":
    sys.exit(main())
