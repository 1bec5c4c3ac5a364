"""Measures the forms of the head: agreement first, then memory, then time, all forms in the same rounds."""

import argparse
import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax

from benchmarks.harness import environments
from benchmarks.harness.process import Contender, Local, RemoteError, start
from benchmarks.harness.race import MissingError, log, measurable, noted, race
from benchmarks.harness.results import Result
from benchmarks.suites.head import jax_forms
from benchmarks.suites.head.forms import Form, choose
from benchmarks.suites.head.problem import Options, Size, make_inputs
from benchmarks.suites.head.rates import RATES, Rates, rates_of

REQUIREMENTS = ("numpy==2.4.6", "packaging==25.0")
TORCH = "torch==2.13.0"
RELEASES = {"trl": "trl==1.16.0", "verl": "verl==0.9.1", "liger_kernel": "liger-kernel==0.8.5"}


@dataclasses.dataclass
class SizeResults:
    """Measurements at one size."""

    size: Size
    results: dict[str, Result]
    rates: Rates | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return dataclasses.asdict(self) | {"size": self.size._asdict()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "SizeResults":
        """Reads the plain data of `as_json`."""
        rates = fields["rates"]
        results = {name: Result(**result) for name, result in fields["results"].items()}
        return cls(Size(**fields["size"]), results, None if rates is None else Rates(**rates))


def torch_paths(directory: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns PyTorch's environment and the directory of the releases."""
    return directory.absolute() / "venv", directory.absolute() / "releases"


def make_torch_env(directory: pathlib.Path, index: str | None) -> None:
    """Makes an environment with PyTorch, and unpacks the releases beside it.

    Args:
      index: package index for PyTorch in place of PyPI, whose build for Linux has CUDA in it; the index of the build
        for CPUs is `https://download.pytorch.org/whl/cpu`.
    """
    venv, releases = torch_paths(directory)
    environments.make(venv, [*(("--index-url", index) if index else ()), TORCH], REQUIREMENTS)
    for name, requirement in RELEASES.items():
        if not (releases / name).exists():
            environments.make(venv, ["--no-deps", "--target", str(releases / name), requirement])


def missing_torch_env(directory: pathlib.Path | None) -> str | None:
    """Explains why PyTorch's forms cannot run, or returns None if they can."""
    venv, releases = torch_paths(directory or pathlib.Path())
    paths = [environments.interpreter(venv), *(releases / name for name in RELEASES)]
    return environments.missing(directory, paths, "torch-env")


@dataclasses.dataclass
class Suite:
    """The contenders of one size.

    Attributes:
      options: of the command line; shared: of every process; scratch: directory of arrays; forms: by name;
      results: by name; contenders: by framework.
    """

    options: argparse.Namespace
    shared: Options
    scratch: pathlib.Path
    forms: dict[str, Form]
    results: dict[str, Result] = dataclasses.field(default_factory=dict)
    contenders: dict[str, Contender] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def process(self, framework: str) -> Any:
        """Starts a process that has loaded the arrays."""
        arguments = {"inputs": str(self.scratch), "options": dataclasses.asdict(self.shared)}
        python = None
        if framework == "torch":
            venv, releases = torch_paths(self.options.torch_env)
            python, arguments["releases"] = environments.interpreter(venv), str(releases)
        with start(f"benchmarks.suites.head.{framework}_forms", python=python) as remote:
            remote.ask(do="load", **arguments)
            yield remote

    def ask(self, name: str, do: str, **arguments: Any) -> Any:
        """Asks the contender of a form."""
        return self.contenders[self.forms[name].framework].ask(do=do, name=name, **arguments)

    def start_torch(self, stack: contextlib.ExitStack) -> None:
        """Starts PyTorch's process, or says in the results of its forms why it cannot run."""
        results = [result for name, result in self.results.items() if self.forms[name].framework == "torch"]
        if not results:
            return
        try:
            missing = missing_torch_env(self.options.torch_env)
            if missing is not None:
                raise MissingError(missing)
            log("starts PyTorch's process")
            self.contenders["torch"] = stack.enter_context(self.process("torch"))
        except (MissingError, RemoteError) as error:
            for result in results:
                result.problem, result.failed = str(error), isinstance(error, RemoteError)

    def compare(self) -> None:
        """Compares the loss and the gradients of every form with those of its baseline."""
        for name in {form.baseline: None for form in self.forms.values()}:
            with noted(self.results[name]):
                self.ask(name, "save", directory=str(self.scratch))
        for name, result in measurable(self.results):
            baseline = self.forms[name].baseline
            if self.results[baseline].problem is None:
                log(f"compares {name}")
                with noted(result):
                    found = self.ask(name, "compare", directory=str(self.scratch), baseline=baseline)
                    result.loss, result.differences = found["loss"], found["differences"]

    def measure_memory(self) -> None:
        """Measures temporary memory, and peak memory in fresh processes."""
        for name, result in measurable(self.results):
            with noted(result):
                result.temp_bytes = self.ask(name, "temporary")
            if not (self.options.no_peak or self.options.quick):
                log(f"measures the memory of {name}")
                with noted(result), self.process(self.forms[name].framework) as fresh:
                    peak = fresh.ask(do="peak", name=name)
                    result.peak_bytes = {} if peak is None else {"run": peak}

    def race(self, size: Size) -> Rates:
        """Times all forms and the rates of the machine in the same rounds."""
        rates = {name: Result(name) for name in RATES}
        local = self.contenders["jax"]

        def run(name: str) -> Any:
            return local.ask(do="run", name=name) if name in rates else self.ask(name, "run")

        race(rates | self.results, self.options.rounds, run)
        seconds = {name: result.best("wall") or float("nan") for name, result in rates.items()}
        tile = self.results.get("tile")
        kind = jax.devices(self.shared.device)[0].device_kind
        return rates_of(size, self.shared, kind, seconds, None if tile is None else tile.best("wall"))


def measure(size: Size, options: argparse.Namespace, shared: Options) -> tuple[SizeResults, dict[str, str]]:
    """Measures one size; returns the versions of the libraries too."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        log(f"{size}: makes the inputs")
        suite = Suite(options, shared, pathlib.Path(directory), choose(shared.device, options.contenders))
        suite.results = {name: Result(name) for name in suite.forms}
        make_inputs(size).save(suite.scratch)
        arguments = {"inputs": directory, "options": dataclasses.asdict(shared)}
        suite.contenders["jax"] = Local(jax_forms.load, **arguments)
        suite.start_torch(stack)
        versions: dict[str, str] = {}
        for contender in suite.contenders.values():
            versions |= contender.ask(do="versions")
        suite.compare()
        suite.measure_memory()
        rates = suite.race(size) if options.rounds else None
        return SizeResults(size, suite.results, rates), versions
