"""The head on an accelerator: agreement on arrays of the host, time on large arrays that the device draws."""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import math
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks.harness.process import Remote, start
from benchmarks.harness.race import Contenders, MissingError, measurable, merged, noted
from benchmarks.harness.results import ContenderResult, Measured, ratio
from benchmarks.harness.worker import Worker
from benchmarks.suites.head.forms import FORMS, GROUPS, Form, choose
from benchmarks.suites.head.problem import QUICK, QUICK_TILE, HeadOptions, Size, make_inputs
from benchmarks.suites.head.rates import MATMULS
from benchmarks.suites.head.suite import HeadSuite, compare

LARGE = Size(16_384, 4096, 151_936)
# Loss and gradients are compared at a size whose arrays the host draws in a second.
COMPARED = Size(1024, 512, 16_384)
NAMES = (
    *("naive", "tile", "fused", "torch_chunk", "naive_plain", "fused_plain", "liger"),
    *("naive_lora", "tile_lora", "fused_lora"),
)
TINY = ("naive_plain", "fused_plain", "liger")
ROUNDS = 3


class DeviceHead(HeadSuite):
    """The forms of the head, PyTorch's in a process of the same environment, all in the same rounds.

    Args:
      shared: options of every process; compared: size at which loss and gradients are compared.
    """

    def __init__(self, shared: HeadOptions, compared: Size) -> None:
        super().__init__(shared)
        self.compared = compared

    def measure(self, size: Size, options: argparse.Namespace) -> tuple[Measured, dict[str, str]]:
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
            make_inputs(self.compared).save(pathlib.Path(directory))
            forms = choose(self.device, options.contenders)
            begin = functools.partial(self.start_beside, directory)
            contenders = Contenders({name: form.framework for name, form in forms.items()}, begin)
            versions = contenders.begin(stack)
            compare(contenders, forms, directory)
            if size != self.compared:
                enlarge(contenders, size)
            for name, result in measurable(contenders.results):
                with noted(result):
                    result.temp_bytes = contenders.ask(name, "temporary", name=name)
                    peak = contenders.ask(name, "device_peak", name=name)
                    result.peak_bytes = {} if peak is None else {"run": peak}
            rates = self.race(contenders, size, options.rounds)
        return Measured(size, contenders.results, rates), merged(versions)

    def start_beside(self, directory: str, framework: str) -> contextlib.AbstractContextManager[Remote | Worker]:
        """Returns JAX's contender of this process, or starts a process for PyTorch's."""
        if framework == "jax":
            return contextlib.nullcontext(self.local(directory))
        return self.beside(directory)

    @contextlib.contextmanager
    def beside(self, directory: str) -> Iterator[Remote]:
        """Starts the contender of PyTorch in the environment of this process.

        Raises:
          MissingError: if it has no PyTorch.
        """
        if importlib.util.find_spec("torch") is None:
            raise MissingError("PyTorch is not installed here")
        with start("benchmarks.suites.head.torch_forms") as remote:
            remote.ask(do="load", inputs=directory, options=dataclasses.asdict(self.shared))
            yield remote


def enlarge(contenders: Contenders, size: Size) -> None:
    """Lets each process draw arrays of a size; an error is a problem of its contenders."""
    for framework, remote in contenders.remotes.items():
        drawn = ContenderResult(framework)
        with noted(drawn):
            remote.ask(do="redraw", **dataclasses.asdict(size))
        for name, result in measurable(contenders.results):
            if drawn.problem is not None and contenders.processes[name] == framework:
                result.problem, result.failed = drawn.problem, True


class HeadContender:
    """Measures all forms at once, so that their rounds are interleaved."""

    def __init__(self, tiny: bool) -> None:
        platform = jax.default_backend()
        device = platform if platform in ("cpu", "tpu") else "gpu"
        tile = QUICK_TILE if tiny else None
        self.suite = DeviceHead(HeadOptions(device, "bf16", threads=0, tile=tile), QUICK if tiny else COMPARED)
        self.size, self.rounds = (QUICK, 1) if tiny else (LARGE, ROUNDS)
        self._versions: dict[str, str] = {}

    def versions(self) -> dict[str, str]:
        """Returns the versions of the libraries that took part."""
        return self._versions

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Returns a row for each form, and one for the matmul rate that they are compared with."""
        names = [name for name in (TINY if self.size == QUICK else NAMES) if name in choose(self.suite.device)]
        options = argparse.Namespace(contenders=names, rounds=self.rounds)
        measured, self._versions = self.suite.measure(self.size, options)
        rate = None if measured.rates is None or math.isnan(measured.rates.mixed) else measured.rates.mixed
        products = ", ".join(MATMULS.values())
        rows = [{"name": f"matmuls of a tile alone: {products}", "of": str(self.size), "rate": rate and rate / 1e12}]
        return rows + [self._row(form, measured, rate) for form in FORMS if form.name in measured.results]

    def _row(self, form: Form, measured: Measured, rate: float | None) -> dict[str, Any]:
        result, naive = measured.results[form.name], measured.results[form.baseline]
        wrong = [f"{name} differs by {by:.0e}" for name, by in result.differences.items()
                 if not by <= self.suite.tolerances[name]]  # fmt: skip
        seconds = result.best("wall")
        reached = ratio(form.matmuls * self.size.flops, seconds)
        return {
            "name": form.title,
            "of": GROUPS[form.group],
            "ms": seconds and 1e3 * seconds,
            "of_naive": ratio(seconds, naive.best("wall")),
            "bytes": result.temp_bytes if form.framework == "jax" else result.peak_bytes.get("run"),
            "rate": reached and reached / 1e12,
            "share": ratio(reached, rate),
            "differs": result.differences.get("gradients"),
            **({"absent": result.problem} if result.problem and not result.failed else {}),
            **({"problem": result.problem or ", ".join(wrong)} if result.failed or wrong else {}),
        }


load = HeadContender
