"""All that an accelerator is to show, in one command of a quarter of an hour, without network.

    python -m benchmarks.accelerator [--out DIR]        writes accelerator-KIND.json and .md there

The parts: the recorded PyTorch results in float32 and bfloat16 on the device; the LM head of kljax, naive JAX, compiled
chunks of PyTorch and Liger; attention by each implementation; products of experts against dense ones; sampling and
updates of random Qwen3 models with LoRA and with all weights. Each part has processes of its own and a share of the
time. What fails is a row with its error, and makes the command return 1. Without an accelerator, and with `--tiny`, all
sizes are small: a smoke test.
"""

import argparse
import contextlib
import dataclasses
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
from benchmarks.harness.report import Column, Report, table

Row = dict[str, Any]
# A process takes what it needs, so that one that measures beside another finds memory.
SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
FAMILIES = ("kl", "losses", "advantages", "reductions", "rewards", "corrections", "diagnostics")
BUDGET = 900


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the measurement: what the contender of a module is asked, on an accelerator or a CPU.

    Attributes:
      share: of the time of all parts; what a part leaves goes to the later ones.
      load: arguments of the contender, for a smoke test or not.
      fresh: whether each request gets a process of its own, which has all of the memory.
    """

    title: str
    module: str
    requests: Sequence[str]
    tiny: Sequence[str]
    share: float
    columns: Mapping[str, Column]
    load: Callable[[bool], dict[str, Any]] = lambda tiny: {"tiny": tiny}
    fresh: bool = False


# A table leaves out the columns that no row has.
HEAD_COLUMNS = {
    "of": ("what", ""),
    "ms": ("ms", ".3g"),
    "of_naive": ("of naive", ".2f"),
    "rate": ("TFLOP/s", ".3g"),
    "share": ("of the published rate", ".0%"),
    "bytes": ("temporary MiB", "MiB"),
    "differs": ("gradients differ by", ".0e"),
}
PARTS = (
    Part(
        "Recorded PyTorch results, errors over their bounds",
        "tests.goldens.narrow",
        [f"{family} {dtype}" for dtype in ("float32", "bfloat16") for family in FAMILIES],
        ["kl float32"],
        0.15,
        {"compared": ("compared", "d"), "cases": ("of", "d"), "share": ("largest error / bound", ".2g")},
        load=lambda tiny: {"every": 80 if tiny else 2},
    ),
    Part(
        "The LM head in bfloat16",
        "benchmarks.suites.accelerator.head",
        ["all"],
        ["all"],
        0.25,
        HEAD_COLUMNS,
    ),
    Part(
        "The LM head by tiles and chunks of tokens",
        "benchmarks.suites.accelerator.tiles",
        [
            "naive",
            "tile",
            "tile 4096x2048",
            "tile 2048x16384",
            "tile 8192x8192",
            "fused",
            "fused 2048x2048",
            "fused 8192x2048",
        ],
        ["naive", "tile 16x8", "fused 16x8"],
        0.15,
        HEAD_COLUMNS,
    ),
    Part(
        "Attention with gradients in bfloat16",
        "benchmarks.suites.accelerator.attention",
        [
            "Qwen3-0.6B, 16 x 1,024",
            "Qwen3-8B, 4 x 4,096",
            "Qwen3-8B, 4 x 4,096, window of 1,024",
            "Qwen3-8B, 4 x 8 x 512 packed",
            "Qwen3-8B, 4 x (512 + 8 x 448)",
            "Qwen3-8B, 4 trees of 16 x 1,024",
        ],
        ["tiny"],
        0.1,
        {
            "chosen": ("chosen", ""),
            "ms": ("ms", ".3g"),
            "of_dense": ("over dense", ".2f"),
            "bytes": ("temporary MiB", "MiB"),
            "differs": ("differs by", ".0e"),
        },
    ),
    Part(
        "Experts in bfloat16",
        "benchmarks.suites.accelerator.experts",
        ["Qwen3-30B-A3B, 1,024 rows an expert", "4 layers of its experts, 64 slots"],
        ["tiny product", "tiny sampling"],
        0.1,
        {
            "ms": ("ms", ".3g"),
            "of_equal": ("over equal groups", ".2f"),
            "of_dense": ("over dense", ".2f"),
            "rate": ("TFLOP/s", ".3g"),
            "bytes": ("temporary MiB", "MiB"),
        },
    ),
    Part(
        "Sampling and update of a random model",
        "benchmarks.suites.accelerator.model",
        ["Qwen3-0.6B lora", "Qwen3-0.6B full", "Qwen3-4B lora", "Qwen3-4B full"],
        ["tiny lora"],
        0.35,
        {
            "rollout_s": ("sampling s", ".3g"),
            "rollout_rate": ("tokens/s", ",.0f"),
            "rollout_mfu": ("MFU", ".1%"),
            "rollout_bytes": ("peak MiB", "MiB"),
            "update_s": ("update s", ".3g"),
            "update_rate": ("tokens/s", ",.0f"),
            "update_mfu": ("MFU", ".1%"),
            "update_bytes": ("peak MiB", "MiB"),
        },
        load=lambda tiny: {},
        fresh=True,
    ),
)
NAMES = {part.module.rpartition(".")[2].replace("narrow", "parity"): part for part in PARTS}


@dataclasses.dataclass
class Runner:
    """Asks the contender of a part for its rows until a `time.monotonic`; what fails is a row with its error."""

    part: Part
    tiny: bool
    until: float
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def measure(self) -> list[Row]:
        """Returns all rows of the part."""
        requests = self.part.tiny if self.tiny else self.part.requests
        rows = list[Row]()
        remote = None
        with contextlib.ExitStack() as stack:
            for number, request in enumerate(requests):
                # A slow request leaves time for the later ones.
                seconds = (self.until - time.monotonic()) * min(1.0, 3 / (len(requests) - number))
                log(f"{self.part.title}: {request}, {max(seconds, 0):.0f} s at most")
                if seconds <= 0:
                    rows.append({"name": request, "problem": "not measured: the time of the part was over"})
                    continue
                new = remote is None or self.part.fresh or not remote.alive
                if new or remote is None:
                    stack.close()
                    remote = stack.enter_context(start(self.part.module, settings=SETTINGS, quiet=True))
                rows += self._answer(remote, request, seconds, new)
        return rows

    def _answer(self, remote: Remote, request: str, seconds: float, new: bool) -> list[Row]:
        # Ends the process of a request that takes longer.
        timer = threading.Timer(seconds, remote.kill)
        until = time.monotonic() + seconds
        timer.start()
        try:
            if new:
                remote.ask(do="load", **self.part.load(self.tiny))
            rows: list[Row] = remote.ask(do="rows", of=request, seconds=0.7 * seconds)
            self.versions |= remote.ask(do="versions")
        except RemoteError as error:
            late = f"took longer than {seconds:.0f} s" if time.monotonic() >= until else None
            return [{"name": request, "problem": late or " ".join(str(error).split())[-500:]}]
        finally:
            timer.cancel()
        return rows


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
    cli.prepare_output("--out", options.json)
    cli.prepare_output("--out", options.markdown)
    return fields


main = cli.command(
    "accelerator",
    __doc__,
    _measure,
    report,
    cli.option("--out", type=pathlib.Path, metavar="DIR", default=pathlib.Path("benchmarks/results"),
               help="of both files, in place of --json and --markdown"),
    cli.option("--budget-seconds", type=cli.positive, default=BUDGET, metavar="S", help=f"of all parts; {BUDGET}"),
    cli.option("--parts", type=cli.some_of(NAMES), metavar="NAMES", help=f"out of {','.join(NAMES)}"),
    cli.option("--tiny", action="store_true", help="small sizes also on an accelerator"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
