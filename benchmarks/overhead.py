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

from benchmarks.harness import cli, machine
from benchmarks.harness.report import Report, table
from benchmarks.harness.results import Check
from benchmarks.suites.overhead import sources, steps
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


def report(fields: Mapping[str, Any]) -> Report:
    """Compares the steps of each round with each other; the medians of the rounds count."""
    work = StepSizes(**fields["work"])
    how = [f"{work.rows} completions of {work.completion_length} tokens, a width of {work.width}"]
    if "recorded" in fields:
        how.append(f"medians of {fields['rounds']} interleaved rounds after the first epoch")
        return Report([table(RECORDED_COLUMNS, _recorded_rows(fields["recorded"]))], fields=fields, how=how)
    how += [f"a state of {fields['bytes'] / 1e6:.1f} MB", f"medians of {fields['rounds']} interleaved rounds"]
    # The mean seconds of each kind of step for each round: wall, CPU, and in writing.
    means = [
        {kind: tuple(map(mean, zip(*values, strict=True))) for kind, values in seconds.items()}
        for seconds in fields["steps"]
    ]
    rows, over = [], dict[str, tuple[float, float, float]]()
    for kind, title in TITLES.items():
        # Over the plain steps of the round; the time in writing, over the rest of the step.
        over[kind] = (
            median(seconds[kind][0] / seconds["plain"][0] for seconds in means),
            median(seconds[kind][1] / seconds["plain"][1] for seconds in means),
            1 + median(seconds[kind][2] / (seconds[kind][0] - seconds[kind][2]) for seconds in means),
        )
        wall, cpu, writing = (median(seconds[kind][clock] for seconds in means) for clock in range(3))
        rows.append([title, wall, over[kind][0], cpu, over[kind][1], writing])
    rounds, of_server = fields["server"], dict[str, float]()
    served: list[list[Any]] = [
        [f"the {part} alone", median(seconds["ahead: 0"][part] for seconds in rounds), None]
        for part in ("answer", "update")
    ]
    for name in sources.AHEAD:
        # Over the longer of answer and update, which are parts of the steps of the round that wait for each other.
        longer = [max(seconds["ahead: 0"]["answer"], seconds["ahead: 0"]["update"]) for seconds in rounds]
        of_server[name] = median(seconds[name]["step"] / most for seconds, most in zip(rounds, longer, strict=True))
        served.append([f"a step with `{name}`", median(seconds[name]["step"] for seconds in rounds), of_server[name]])
    # The loop's own time in writing is compared, which other programs on the machine prolong as they prolong the step;
    # the other value is that of the wall time of whole steps.
    checks = [
        Check("metrics in every step", STALL, over["logged"][2], over["logged"][0], digits=3),
        Check("the step that saves the state", STALL, over["saved"][2], over["saved"][0], digits=3),
        Check("a verifier of a tenth of the step", VERIFIED, over["verified"][0], digits=3),
        Check("a server one step ahead", SERVER, of_server["ahead: 1"]),
    ]
    return Report([table(COLUMNS, rows), table(SERVER_COLUMNS, served)], checks, "whole steps", fields, how)


def _recorded_rows(rounds: list[dict[str, Any]]) -> list[list[Any]]:
    names, rows = list(sources.RECORDED), list[list[Any]]()
    for once, every in zip(names[::2], names[1::2], strict=True):
        for name in (once, every):
            rows.append([name])
            for clock in range(2):
                rows[-1].append(median(seconds[name][clock] for seconds in rounds))
                rows[-1].append(median(seconds[name][clock] / seconds[every][clock] for seconds in rounds))
    return rows


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    work = StepSizes(**QUICK) if options.quick else StepSizes()
    fields = machine.conditions() | {"rounds": options.rounds, "work": vars(work)}
    if options.recorded:
        return fields | {"recorded": sources.measure_recorded(work, options.rounds)}
    seconds, size = steps.measure(work, options.rounds)
    return fields | {"bytes": size, "steps": seconds, "server": sources.measure_server(work, options.rounds)}


main = cli.command(
    "overhead",
    __doc__,
    _measure,
    report,
    cli.rounds(12),
    cli.option("--recorded", action="store_true", help="time the steps with recorded completions alone"),
    cli.option("--quick", action="store_true", help="a smoke test: a tiny model"),
)

if __name__ == "__main__":
    sys.exit(main())
