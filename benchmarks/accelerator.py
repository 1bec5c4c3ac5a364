"""All that an accelerator is to show, in one command of less than eight minutes, without network.

    python -m benchmarks.accelerator --requirements     lists the wheels that this machine lacks
    python -m benchmarks.accelerator [--out DIR]        writes accelerator-KIND.json and .md there

The parts: the recorded PyTorch results in float32 and bfloat16 on the device; the LM head of kljax, naive JAX, compiled
chunks of PyTorch and Liger; attention kernels against XLA; sampling and updates of random Qwen3 models with LoRA and
with all weights. Each part has processes of its own and a share of the time. What fails is a row with its error, and
makes the command return 1. Without an accelerator, and with `--tiny`, all sizes are small: a smoke test.
"""

import pathlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import cli
from benchmarks.harness.machine import load
from benchmarks.harness.process import RemoteError, start
from benchmarks.harness.report import Column, conditions, join, table
from benchmarks.suites.accelerator import packages
from benchmarks.suites.accelerator.parts import PARTS, SETTINGS, Part, Row, Runner

BUDGET = 450


def describe() -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the machine with its devices, and the versions of the libraries.

    Raises:
      RemoteError: JAX finds no device, or is not installed.
    """
    with start("benchmarks.suites.accelerator.probe", settings=SETTINGS, quiet=True) as probe:
        probe.ask(do="load")
        machine: dict[str, Any] = probe.ask(do="describe")
        versions: dict[str, str] = probe.ask(do="versions")
        return machine, versions


def measure(parts: Sequence[Part], *, tiny: bool, seconds: float) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """Measures the parts one after the other; returns rows by title, and versions."""
    found, versions = dict[str, list[Row]](), dict[str, str]()
    until, whole = time.monotonic(), sum(part.share for part in parts)
    for part in parts:
        # From the planned end of the part before: what that left is kept.
        until += seconds * part.share / whole
        runner = Runner(part, tiny, until)
        found[part.title] = runner.measure()
        versions |= runner.versions
    return found, versions


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the page: conditions, and a table for each part with the errors of its rows."""
    machine = {name: value for name, value in report["machine"].items() if name not in ("platform", "devices")}
    how = [f"{'tiny sizes' if report['tiny'] else 'full sizes'}, one device of {report['machine']['devices']}"]
    parts = conditions({**report, "machine": machine}, how)
    for part in PARTS:
        rows = report["parts"].get(part.title)
        if rows is not None:
            keys = [key for key in part.columns if any(row.get(key) is not None for row in rows)]
            columns: list[Column] = [("", ""), *(part.columns[key] for key in keys)]
            cells = [[row["name"], *(row.get(key) for key in keys)] for row in rows]
            parts += [f"### {part.title}", table(columns, cells)]
            parts += [f"Failed: {row['name']}: {row['problem']}." for row in rows if "problem" in row]
            parts += [f"Not measured: {row['name']}: {row['absent']}." for row in rows if "absent" in row]
    return join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a row failed."""
    parser = cli.make_parser("accelerator", __doc__)
    add = parser.add_argument
    add("--out", type=pathlib.Path, metavar="DIR", default=pathlib.Path("benchmarks/results"), help="of both files")
    add("--requirements", action="store_true", help="list the wheels that this machine lacks, and measure nothing")
    add("--budget-seconds", type=cli.positive, default=BUDGET, metavar="S", help=f"of all parts; {BUDGET}")
    add("--parts", type=cli.names, metavar="NAMES", help="of head, attention, model and parity, separated by commas")
    add("--tiny", action="store_true", help="small sizes also on an accelerator")
    options = parser.parse_args(arguments)
    if options.requirements:
        print("\n".join(packages.missing()))
        return 0
    known = {part.module.rpartition(".")[2].replace("narrow", "parity"): part for part in PARTS}
    unknown = sorted(set(options.parts or ()) - set(known))
    if unknown:
        parser.error(f"argument --parts: got {unknown}, expected some of {sorted(known)}")
    try:
        machine, versions = describe()
    except RemoteError as error:
        print(f"ERROR no device: {error}", file=sys.stderr)
        return 1
    before, tiny = load(), options.tiny or machine["platform"] == "cpu"
    parts = [part for name, part in known.items() if options.parts is None or name in options.parts]
    found, more = measure(parts, tiny=tiny, seconds=options.budget_seconds)
    report = {"machine": machine, "versions": versions | more, "tiny": tiny, "load": [before, load()], "parts": found}
    kind = re.sub(r"\W+", "-", str(machine.get("device", machine["platform"]))).strip("-").lower()
    name = f"accelerator-{kind}{'-tiny' if tiny else ''}"
    options.json, options.markdown = (options.out / f"{name}.{suffix}" for suffix in ("json", "md"))
    wrong = [f"{row['name']}: {row['problem']}" for rows in found.values() for row in rows if "problem" in row]
    return cli.finish(options, markdown(report), report, wrong)


if __name__ == "__main__":
    sys.exit(main())
