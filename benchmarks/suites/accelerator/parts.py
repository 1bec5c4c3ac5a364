"""The parts of the measurement, each in processes of its own and within a time of its own."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness.process import Remote, RemoteError, start
from benchmarks.harness.race import log
from benchmarks.harness.report import Column

Row = dict[str, Any]
# A process takes what it needs, so that one that measures beside another finds memory.
SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
FAMILIES = ("kl", "losses", "advantages", "reductions", "rewards", "corrections", "diagnostics")


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the measurement.

    Attributes:
      module: of the contender, whose `rows(of, seconds)` answers a request with rows.
      requests: on an accelerator; tiny: on a CPU.
      share: of the time of all parts; what a part leaves goes to the later ones.
      columns: keys of a row with title and format.
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


PARTS = (
    Part(
        "Recorded PyTorch results, errors over their bounds",
        "tests.goldens.narrow",
        [f"{family} {dtype}" for dtype in ("float32", "bfloat16") for family in FAMILIES],
        ["kl float32"],
        0.2,
        {"compared": ("compared", "d"), "cases": ("of", "d"), "share": ("largest error / bound", ".2g")},
        load=lambda tiny: {"every": 80 if tiny else 2},
    ),
    Part(
        "The LM head in bfloat16",
        "benchmarks.suites.accelerator.head",
        ["all"],
        ["all"],
        0.3,
        {
            "of": ("what", ""),
            "ms": ("ms", ".3g"),
            "of_naive": ("of naive", ".2f"),
            "rate": ("TFLOP/s", ".3g"),
            "share": ("of the matmul rate", ".0%"),
            "bytes": ("temporary MiB", "MiB"),
            "differs": ("gradients differ by", ".0e"),
        },
    ),
    Part(
        "Attention with gradients in bfloat16",
        "benchmarks.suites.accelerator.attention",
        ["Qwen3-0.6B, 16 x 1,024", "Qwen3-8B, 4 x 4,096", "Qwen3-8B, 4 x 4,096, window of 1,024"],
        ["tiny"],
        0.1,
        {
            "kernel": ("kernel", ""),
            "xla_ms": ("XLA ms", ".3g"),
            "own_ms": ("kernel ms", ".3g"),
            "speed": ("XLA / kernel", ".2f"),
            "xla_bytes": ("XLA MiB", "MiB"),
            "own_bytes": ("kernel MiB", "MiB"),
            "differs": ("differ by", ".0e"),
        },
    ),
    Part(
        "Sampling and update of a random model",
        "benchmarks.suites.accelerator.model",
        ["Qwen3-0.6B lora", "Qwen3-0.6B full", "Qwen3-4B lora", "Qwen3-4B full"],
        ["tiny lora"],
        0.4,
        {
            "sample_s": ("sampling s", ".3g"),
            "sample_rate": ("tokens/s", ",.0f"),
            "sample_mfu": ("MFU", ".1%"),
            "sample_bytes": ("peak MiB", "MiB"),
            "update_s": ("update s", ".3g"),
            "update_rate": ("tokens/s", ",.0f"),
            "update_mfu": ("MFU", ".1%"),
            "update_bytes": ("peak MiB", "MiB"),
        },
        load=lambda tiny: {},
        fresh=True,
    ),
)


@dataclasses.dataclass
class Runner:
    """Asks the contender of a part for its rows; what fails is a row with its error.

    Attributes:
      until: when the time of the part is over, of `time.monotonic`.
    """

    part: Part
    tiny: bool
    until: float
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def measure(self) -> list[Row]:
        """Returns all rows of the part."""
        requests = self.part.tiny if self.tiny else self.part.requests
        rows, remote = list[Row](), None
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
        timer, until = threading.Timer(seconds, remote.kill), time.monotonic() + seconds
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
