"""All that an accelerator is to show, in one command of less than eight minutes, without network.

    python -m benchmarks.accelerator --requirements     lists the wheels that this machine lacks
    python -m benchmarks.accelerator [--out DIR]        writes accelerator-KIND.json and .md there

The parts: the recorded PyTorch results in float32 and bfloat16 on the device; the LM head of kljax, naive JAX, compiled
chunks of PyTorch and Liger; attention kernels against XLA; sampling and updates of random Qwen3 models with LoRA and
with all weights. Each part has processes of its own and a share of the time. What fails is a row with its error, and
makes the command return 1. Without an accelerator, and with `--tiny`, all sizes are small: a smoke test.
"""

import argparse
import pathlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import cli
from benchmarks.harness.machine import load
from benchmarks.harness.process import RemoteError, start
from benchmarks.harness.report import Report, conditions, join, table
from benchmarks.suites.accelerator import packages
from benchmarks.suites.accelerator.parts import PARTS, SETTINGS, Part, Row, Runner

BUDGET = 450
NAMES = {part.module.rpartition(".")[2].replace("narrow", "parity"): part for part in PARTS}


def measure(parts: Sequence[Part], *, tiny: bool, seconds: float) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """Measures the parts one after the other; returns rows by title, and versions."""
    rows, versions = dict[str, list[Row]](), dict[str, str]()
    until, shares = time.monotonic(), sum(part.share for part in parts)
    for part in parts:
        # From the planned end of the part before: time that it left is kept.
        until += seconds * part.share / shares
        runner = Runner(part, tiny, until)
        rows[part.title] = runner.measure()
        versions |= runner.versions
    return rows, versions


def markdown(fields: Mapping[str, Any]) -> str:
    """Returns the page: conditions, and a table for each part with the errors of its rows."""
    machine = {name: value for name, value in fields["machine"].items() if name not in ("platform", "devices")}
    how = [f"{'tiny sizes' if fields['tiny'] else 'full sizes'}, one device of {fields['machine']['devices']}"]
    parts = conditions({**fields, "machine": machine}, how)
    for part in PARTS:
        if rows := fields["parts"].get(part.title):
            keys = [key for key in part.columns if any(row.get(key) is not None for row in rows)]
            cells = [[row["name"], *(row.get(key) for key in keys)] for row in rows]
            parts += [f"### {part.title}", table([("", ""), *(part.columns[key] for key in keys)], cells)]
            parts += [f"Failed: {row['name']}: {row['problem']}." for row in rows if "problem" in row]
            parts += [f"Not measured: {row['name']}: {row['absent']}." for row in rows if "absent" in row]
    return join(parts)


def _report(options: argparse.Namespace) -> Report:
    if options.requirements:
        return Report({}, "\n".join(packages.missing()) + "\n")
    try:
        with start("benchmarks.suites.accelerator.probe", settings=SETTINGS, quiet=True) as probe:
            probe.ask(do="load")
            machine, versions = probe.ask(do="describe"), probe.ask(do="versions")
    except RemoteError as error:
        return Report({}, "", [f"no device: {error}"])
    before, tiny = load(), options.tiny or machine["platform"] == "cpu"
    parts = [part for name, part in NAMES.items() if options.parts is None or name in options.parts]
    rows, more = measure(parts, tiny=tiny, seconds=options.budget_seconds)
    fields = {"machine": machine, "versions": versions | more, "tiny": tiny, "load": [before, load()], "parts": rows}
    kind = re.sub(r"\W+", "-", str(machine.get("device", machine["platform"]))).strip("-").lower()
    path = options.out / f"accelerator-{kind}{'-tiny' if tiny else ''}"
    options.json, options.markdown = (pathlib.Path(f"{path}.{suffix}") for suffix in ("json", "md"))
    wrong = [f"{row['name']}: {row['problem']}" for part in rows.values() for row in part if "problem" in row]
    return Report(fields, markdown(fields), wrong)


main = cli.command(
    "accelerator",
    __doc__,
    _report,
    cli.option("--out", type=pathlib.Path, metavar="DIR", default=pathlib.Path("benchmarks/results"),
               help="of both files, in place of --json and --markdown"),
    cli.option("--requirements", action="store_true", help="list the wheels that this machine lacks, no more"),
    cli.option("--budget-seconds", type=cli.positive, default=BUDGET, metavar="S", help=f"of all parts; {BUDGET}"),
    cli.option("--parts", type=cli.some_of(NAMES), metavar="NAMES", help=f"out of {','.join(NAMES)}"),
    cli.option("--tiny", action="store_true", help="small sizes also on an accelerator"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
