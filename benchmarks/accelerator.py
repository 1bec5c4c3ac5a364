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
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import cli
from benchmarks.harness.measure import load
from benchmarks.harness.process import RemoteError, start
from benchmarks.harness.report import Report, table
from benchmarks.suites.accelerator import packages
from benchmarks.suites.accelerator.parts import PARTS, SETTINGS, Runner

BUDGET = 450
NAMES = {part.module.rpartition(".")[2].replace("narrow", "parity"): part for part in PARTS}


def report(fields: Mapping[str, Any]) -> Report:
    """Makes a table for each part, with the errors of its rows."""
    machine = {name: value for name, value in fields["machine"].items() if name not in ("platform", "devices")}
    how = [f"{'tiny sizes' if fields['tiny'] else 'full sizes'}, one device of {fields['machine']['devices']}"]
    paragraphs, failed = list[str](), list[str]()
    for part in PARTS:
        if rows := fields["parts"].get(part.title):
            keys = [key for key in part.columns if any(row.get(key) is not None for row in rows)]
            cells = [[row["name"], *(row.get(key) for key in keys)] for row in rows]
            problems = [f"{row['name']}: {row['problem']}" for row in rows if "problem" in row]
            paragraphs += [f"### {part.title}", table([("", ""), *(part.columns[key] for key in keys)], cells)]
            paragraphs += [f"Failed: {problem}." for problem in problems]
            paragraphs += [f"Not measured: {row['name']}: {row['absent']}." for row in rows if "absent" in row]
            failed += problems
    return Report(paragraphs, fields={**fields, "machine": machine}, how=how, failures=failed)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.requirements:
        raise cli.EndError("\n".join(packages.missing()), status=0)
    try:
        # In a process that ends before the next one needs the devices.
        with start("benchmarks.suites.accelerator.model", settings=SETTINGS, quiet=True) as probe:
            probe.ask(do="load")
            machine, versions = probe.ask(do="describe"), probe.ask(do="versions")
    except RemoteError as error:
        raise cli.EndError(f"no device: {error}") from error
    tiny = options.tiny or machine["platform"] == "cpu"
    fields = {"machine": machine, "versions": versions, "tiny": tiny, "load": [load(), None], "parts": {}}
    parts = [part for name, part in NAMES.items() if options.parts is None or name in options.parts]
    until = time.monotonic()
    for part in parts:
        # From the planned end of the part before: time that it left is kept.
        until += options.budget_seconds * part.share / sum(other.share for other in parts)
        runner = Runner(part, tiny, until)
        fields["parts"][part.title] = runner.measure()
        versions |= runner.versions
    kind = re.sub(r"\W+", "-", str(machine.get("device", machine["platform"]))).strip("-").lower()
    path = options.out / f"accelerator-{kind}{'-tiny' if tiny else ''}"
    options.json, options.markdown = (pathlib.Path(f"{path}.{suffix}") for suffix in ("json", "md"))
    return fields


main = cli.command(
    "accelerator",
    __doc__,
    _measure,
    report,
    cli.option("--out", type=pathlib.Path, metavar="DIR", default=pathlib.Path("benchmarks/results"),
               help="of both files, in place of --json and --markdown"),
    cli.option("--requirements", action="store_true", help="list the wheels that this machine lacks, no more"),
    cli.option("--budget-seconds", type=cli.positive, default=BUDGET, metavar="S", help=f"of all parts; {BUDGET}"),
    cli.option("--parts", type=cli.some_of(NAMES), metavar="NAMES", help=f"out of {','.join(NAMES)}"),
    cli.option("--tiny", action="store_true", help="small sizes also on an accelerator"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
