"""All that an accelerator is to show, in one command of a quarter of an hour, without network.

    python -m benchmarks.accelerator [--out DIR]        writes accelerator-KIND.json and .md there
    python -m benchmarks.accelerator --plan next --peers PYTHON [--minutes 30]

The parts: the recorded PyTorch results in float32 and bfloat16 on the device; the LM head of kljax, naive JAX, compiled
chunks of PyTorch and Liger; attention by each implementation; products of experts against dense ones; sampling and
updates of random Qwen3 models with LoRA and with all weights. Each part has processes of its own and a share of the
time.

The plan `next` has the parts that no card has shown yet, the most worth first: `make train`, the Pallas kernels against
their formulas, traces, sampling and updates, command buffers, attention, the head, experts, and a race against
transformers, PEFT, TRL and Liger in the environment of `--peers`. A part takes the time that it needs, and one that no
longer fits is left out.

Every result is written at once. What fails is a row with its error, and makes the command return 1. Without an
accelerator, and with `--tiny`, all sizes are small: a smoke test.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness import cli
from benchmarks.harness.measure import load
from benchmarks.harness.process import Remote, RemoteError, start
from benchmarks.harness.race import log
from benchmarks.harness.report import Report, table
from benchmarks.suites.accelerator.parts import PLANS, Part

Row = dict[str, Any]
# A process takes what it needs, so that one that measures beside another finds memory.
SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
MINUTES = 15
MISSING = "MissingError: "
LEAST = 0.5
"""A part of the plan `next` begins if so much of the time that it takes is left."""


@dataclasses.dataclass
class Runner:
    """Asks the contender of a part for its rows until a `time.monotonic`; what fails is a row with its error.

    Attributes:
      part: the part.
      tiny: a smoke test.
      until: the end.
      directory: of larger results.
      peers: the interpreter with the libraries of peers, or None.
      keep: called with all rows so far, after each request.
      versions: of the libraries, by name.
    """

    part: Part
    tiny: bool
    until: float
    directory: pathlib.Path = pathlib.Path()
    peers: pathlib.Path | None = None
    keep: Callable[[list[Row]], None] = lambda rows: None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def measure(self) -> list[Row]:
        """Returns all rows of the part."""
        requests = requests_of(self.part, self.tiny)
        rows = list[Row]()
        remote = None
        with contextlib.ExitStack() as stack:
            for number, request in enumerate(requests):
                # A slow request leaves time for the later ones.
                seconds = (self.until - time.monotonic()) * min(1.0, 3 / (len(requests) - number))
                log(f"{self.part.title}: {request}, {max(seconds, 0):.0f} s at most")
                peer = self.part.peers.get(request)
                if seconds <= 0:
                    rows.append({"name": request, "problem": "not measured: the time of the part was over"})
                elif peer is not None and self.peers is None:
                    rows.append({"name": request, "absent": "no --peers was given"})
                else:
                    new = remote is None or self.part.fresh or not remote.alive
                    if new or remote is None:
                        stack.close()
                        settings = {**SETTINGS, **self.part.settings.get(request, {})}
                        options = {} if peer is None else {"python": self.peers}
                        remote = stack.enter_context(
                            start((peer or self.part).module, settings=settings, quiet=True, **options)
                        )
                    rows += self._answer(remote, request, seconds, new)
                self.keep(rows)
        return rows

    def _answer(self, remote: Remote, request: str, seconds: float, new: bool) -> list[Row]:
        # Ends the process of a request that takes longer.
        timer = threading.Timer(seconds, remote.kill)
        until = time.monotonic() + seconds
        timer.start()
        try:
            peer = self.part.peers.get(request)
            if new:
                load = self.part.load(self.tiny, self.directory) if peer is None else peer.load(self.tiny)
                remote.ask(do="load", **load)
            rows: list[Row] = remote.ask(do="rows", of=request, seconds=0.7 * seconds)
            self.versions |= remote.ask(do="versions")
        except RemoteError as error:
            said = " ".join(str(error).split())
            if said.startswith(MISSING):
                return [{"name": request, "absent": said.removeprefix(MISSING)}]
            late = f"took longer than {seconds:.0f} s" if time.monotonic() >= until else None
            return [{"name": request, "problem": late or said[-500:]}]
        finally:
            timer.cancel()
        return rows


NAMES = tuple(dict.fromkeys(part.name for parts in PLANS.values() for part in parts))


def minutes(text: str) -> float:
    """Reads the time of all parts."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected minutes above 0")
    return value


def interpreter(text: str) -> pathlib.Path:
    """Reads the path of an interpreter, which has to be there."""
    path = pathlib.Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a Python interpreter, such as ENV/bin/python")
    return path.absolute()


def requests_of(part: Part, tiny: bool) -> list[str]:
    """Returns the requests of a part."""
    return list(part.tiny if tiny else part.requests)


def report(fields: Mapping[str, Any]) -> Report:
    """Makes a table for each part, with the errors of its rows."""
    machine = {name: value for name, value in fields["machine"].items() if name not in ("platform", "devices")}
    how = [f"{'tiny sizes' if fields['tiny'] else 'full sizes'}, one device of {fields['machine']['devices']}"]
    paragraphs, failed = list[str](), list[str]()
    for part in PLANS[fields.get("plan", "all")]:
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
    if unused := [f"--{name}" for name in ("json", "markdown") if vars(options)[name] is not None]:
        raise cli.OptionError(f"argument {unused[0]}: has no meaning here; --out names the directory of both files")
    try:
        # In a process that ends before the next one needs the devices.
        with start("benchmarks.suites.accelerator.model", settings=SETTINGS, quiet=True) as probe:
            probe.ask(do="load")
            machine, versions = probe.ask(do="describe"), probe.ask(do="versions")
    except RemoteError as error:
        raise cli.EndError(f"no device: {error}") from error
    tiny = options.tiny or machine["platform"] == "cpu"
    plan = PLANS[options.plan]
    if unknown := sorted(set(options.parts or ()) - {part.name for part in plan}):
        known = ", ".join(part.name for part in plan)
        raise cli.OptionError(f"argument --parts: got {unknown}, expected some of {known} of the plan {options.plan}")
    kind = re.sub(r"\W+", "-", str(machine.get("device", machine["platform"]))).strip("-").lower()
    name = "-".join(
        ["accelerator", *([options.plan] if options.plan != "all" else []), kind, *(["tiny"] if tiny else [])]
    )
    options.json, options.markdown = (options.out / f"{name}.{suffix}" for suffix in ("json", "md"))
    cli.prepare_output("--out", options.json)
    cli.prepare_output("--out", options.markdown)
    fields = {"machine": machine, "versions": versions, "tiny": tiny, "load": [load(), None]}
    fields |= {"plan": options.plan, "parts": {}}
    parts = [part for part in plan if options.parts is None or part.name in options.parts]
    end = time.monotonic() + 60 * options.minutes
    ends = _ends(parts, options.minutes) if options.plan == "all" else {}
    for part in parts:
        left = end - time.monotonic()
        if not ends and left < LEAST * 60 * part.minutes:
            reason = f"takes {part.minutes:g} minutes, and {max(left, 0) / 60:.1f} of --minutes are left"
            fields["parts"][part.title] = [{"name": request, "absent": reason} for request in requests_of(part, tiny)]
            continue
        until = ends.get(part.name) or time.monotonic() + min(left, 60 * part.minutes / LEAST)

        def keep(rows: list[Row], title: str = part.title) -> None:
            fields["parts"][title] = rows
            options.json.write_text(json.dumps(fields, indent=1) + "\n")

        runner = Runner(part, tiny, until, options.out / name, options.peers, keep)
        fields["parts"][part.title] = runner.measure()
        versions |= runner.versions
    return fields


def _ends(parts: Sequence[Part], minutes: float) -> dict[str, float]:
    """Returns the end of each part, so that all get their share of the time; what a part leaves goes to the later."""
    ends = itertools.accumulate(part.minutes for part in parts)
    share = 60 * minutes / sum(part.minutes for part in parts)
    now = time.monotonic()
    return {part.name: now + share * end for part, end in zip(parts, ends, strict=True)}


main = cli.command(
    "accelerator",
    __doc__,
    _measure,
    report,
    cli.option("--out", type=pathlib.Path, metavar="DIR", default=pathlib.Path("benchmarks/results"),
               help="of both files, in place of --json and --markdown"),
    cli.option("--plan", choices=list(PLANS), default="all", help="the parts and their order; all"),
    cli.option("--minutes", type=minutes, default=MINUTES, metavar="M", help=f"of all parts; {MINUTES}"),
    cli.option("--parts", type=cli.some_of(NAMES), metavar="NAMES", help=f"out of {','.join(NAMES)}"),
    cli.option("--peers", type=interpreter, metavar="PYTHON",
               help="with torch, transformers, peft, trl, datasets and liger-kernel, for the race of the plan next"),
    cli.option("--tiny", action="store_true", help="small sizes also on an accelerator"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
