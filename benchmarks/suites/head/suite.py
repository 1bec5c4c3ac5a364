"""The suite of the LM head: agreement first, then memory, then time, all forms in the same rounds."""

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from benchmarks.harness import environments
from benchmarks.harness.process import Remote, start
from benchmarks.harness.race import Contenders, MissingError, log, measurable, noted, race
from benchmarks.harness.results import Check, ContenderResult, Measured, Target, check, ratio
from benchmarks.harness.suite import Suite, Table
from benchmarks.harness.worker import Worker
from benchmarks.suites.head import jax_forms
from benchmarks.suites.head.forms import FORMS, GROUPS, TITLES, TOLERANCE, Form, choose
from benchmarks.suites.head.problem import SIZES, HeadOptions, Size, make_inputs
from benchmarks.suites.head.rates import RATES, Rates, describe, rates_of

REQUIREMENTS = ("torch==2.13.0", "numpy==2.4.6", "packaging==25.0")
RELEASES = {"trl": "trl==1.16.0", "verl": "verl==0.9.1", "liger_kernel": "liger-kernel==0.8.5"}

LARGE_VOCAB = 131_072
TARGETS = {
    "cpu": (
        Target("temporary", "tile", "naive", 1 / 16, 1 / 24),
        Target("temporary", "tile", "tunix_full", 1 / 24, 1 / 40),
        Target("temporary", "tile", "tunix_chunk", 1 / 3, 1 / 9),
        Target("time", "tile", "naive", 0.8),
        Target("time", "tile", "tunix_chunk", 0.8),
        Target("time", "tile", "trl", 0.9),
        Target("time", "tile", "trl_4096", 0.9),
        Target("time", "tile", "verl", 0.6),
        Target("time", "tile_half", "naive_half", 0.45),
        Target("time", "tile_frozen", "naive_frozen", 0.5),
        Target("time", "tile_kl", "tile", 1.5),
        Target("temporary", "fused", "naive", 1 / 5),
        Target("time", "fused", "naive", 0.88),
        Target("time", "fused", "tile", 0.78, 0.86),
        Target("time", "fused_half", "naive_half", 0.5),
        Target("time", "fused_lora", "tile_lora", 0.75),
        Target("time", "fused_kl", "fused", 1.4),
    ),
    "gpu": (Target("time", "fused_plain", "liger", 1.0), Target("time", "fused", "torch_chunk", 1.0)),
    "tpu": (),
}
# Part of the machine's matmul rate, at least.
RATE = {"cpu": 0.85, "gpu": 0.65, "tpu": 0.65}
RATE_TITLE = "kljax, part of the matmul rate, recomputed matmuls included"
COLUMNS = (
    ("contender", ""),
    ("wall s", ".3g"),
    ("of naive", ".2f"),
    ("CPU s", ".3g"),
    ("of naive", ".2f"),
    ("temporary MiB", "MiB"),
    ("peak MiB", "MiB"),
    ("GFLOP/s", ",.0f"),
    ("loss differs by", ".0e"),
    ("gradients differ by", ".0e"),
)


class HeadSuite(Suite):
    """The forms of the head on a device; each group of forms is a table.

    Args:
      shared: options of every process.
    """

    titles = TITLES
    other_clock = "in CPU seconds"

    def __init__(self, shared: HeadOptions) -> None:
        self.shared, self.device = shared, shared.device
        self.tolerances = dict.fromkeys(("loss", "gradients"), TOLERANCE[shared.dtype])

    def measure(self, size: Size, options: argparse.Namespace) -> tuple[Measured, dict[str, str]]:
        log(f"{size}: makes the inputs")
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
            make_inputs(size).save(pathlib.Path(directory))
            start = functools.partial(self.process, directory, options)

            def start_beside(framework: str) -> contextlib.AbstractContextManager[Remote | Worker]:
                return start(framework) if framework == "torch" else contextlib.nullcontext(self.local(directory))

            forms = choose(self.device, options.contenders)
            contenders = Contenders({name: form.framework for name, form in forms.items()}, start_beside)
            versions = contenders.begin(stack)
            compare(contenders, forms, directory)
            for name, result in measurable(contenders.results):
                with noted(result):
                    result.temp_bytes = contenders.ask(name, "temporary", name=name)
                    if not options.quick:
                        log(f"measures the memory of {name}")
                        with start(forms[name].framework) as fresh:
                            peak = fresh.ask(do="peak", name=name)
                        result.peak_bytes = {} if peak is None else {"run": peak}
            rates = self.race(contenders, size, options.rounds) if options.rounds else None
        return Measured(size, contenders.results, rates), {**versions["jax"], **versions.get("torch", {})}

    def local(self, directory: str) -> Worker:
        """Returns the contender of JAX, in this process."""
        worker = Worker(jax_forms.load)
        worker.ask(do="load", inputs=directory, options=dataclasses.asdict(self.shared))
        return worker

    @contextlib.contextmanager
    def process(self, directory: str, options: argparse.Namespace, framework: str) -> Iterator[Remote]:
        """Starts a process that has loaded the arrays of the directory.

        Raises:
          MissingError: if the environment of PyTorch was not made.
        """
        arguments = {"inputs": directory, "options": dataclasses.asdict(self.shared)}
        python = None
        if framework == "torch":
            missing = missing_torch_env(options.torch_env)
            if missing is not None:
                raise MissingError(missing)
            venv, releases = torch_paths(options.torch_env)
            python, arguments["releases"] = environments.interpreter(venv), str(releases)
        with start(f"benchmarks.suites.head.{framework}_forms", python=python) as remote:
            remote.ask(do="load", **arguments)
            yield remote

    def race(self, contenders: Contenders, size: Size, rounds: int) -> Rates:
        """Times all forms and the rates of the machine in the same rounds."""
        rates = {name: ContenderResult(name) for name in RATES}
        contenders.processes |= dict.fromkeys(rates, "jax")
        race(rates | contenders.results, rounds, lambda name: contenders.ask(name, "run", name=name))
        seconds = {name: result.best("wall") or float("nan") for name, result in rates.items()}
        ours = contenders.results["tile"].best("wall") if "tile" in contenders.results else None
        return rates_of(size, self.shared, jax.devices(self.device)[0].device_kind, seconds, ours)

    def how(self, fields: Mapping[str, Any]) -> list[str]:
        rounds, threads = fields["rounds"], self.shared.threads or "all"
        return [
            f"{self.shared.dtype} hidden states and head",
            *([f"{threads} threads"] if self.device == "cpu" else []),
            f"the fastest of {rounds} interleaved rounds" if rounds else "memory and agreement only",
        ]

    def heading(self, size: Size) -> list[str]:
        meant = f"The targets below are meant for {' and '.join(map(str, SIZES))}."
        return [f"### N={size.tokens:,} D={size.width:,} V={size.vocab:,}", *([] if size in SIZES else [meant])]

    def tables(self, measured: Measured) -> Iterator[Table]:
        for group, text in GROUPS.items():
            forms = [form for form in FORMS if form.group == group and form.name in measured.results]
            if forms:
                yield f"{text[0].upper()}{text[1:]}", COLUMNS, [_row(form, measured) for form in forms]

    def notes(self, measured: Measured) -> list[str]:
        return super().notes(measured) + ([] if measured.rates is None else [describe(measured.rates)])

    def checks(self, measured: Measured) -> list[Check]:
        large = measured.size.vocab >= LARGE_VOCAB
        targets = [target for target in TARGETS[self.device] if target.name in measured.results]
        found = [check(target, title(target), measured.results, large=large) for target in targets]
        part = None if measured.rates is None else ratio(measured.rates.reached, measured.rates.mixed)
        return [*found, Check(RATE_TITLE, RATE[self.device], part, at_least=True, unit="%")]


def title(target: Target) -> str:
    """Describes a target."""
    kinds = {"half": "half masked", "frozen": "frozen head", "lora": "frozen head, entropy", "kl": "exact KL"}
    kind = kinds.get(target.name.partition("_")[2])
    own = TITLES[target.name] if kind is None else f"{TITLES[target.name]}, {kind}"
    without = target.name.endswith("_kl") and target.against == target.name.removesuffix("_kl")
    against = f"{TITLES[target.against]} without it" if without else TITLES[target.against]
    return f"{'memory' if target.measure == 'temporary' else target.measure}: {own}, over {against}"


def _row(form: Form, measured: Measured) -> list[Any]:
    result, naive = measured.results[form.name], measured.results[form.baseline]
    if result.problem is not None:
        return [form.title, "not measured", *[None] * 8]
    wall, cpu = result.best("wall"), result.best("cpu")
    return [
        form.title,
        wall,
        ratio(wall, naive.best("wall")),
        cpu,
        ratio(cpu, naive.best("cpu")),
        result.temp_bytes,
        result.peak_bytes.get("run"),
        ratio(form.matmuls * measured.size.flops / 1e9, wall),
        result.differences.get("loss"),
        result.differences.get("gradients"),
    ]


def torch_paths(directory: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns PyTorch's environment and the directory of the releases."""
    return directory.absolute() / "venv", directory.absolute() / "releases"


def make_torch_env(directory: pathlib.Path) -> None:
    """Makes an environment with PyTorch, and unpacks the releases beside it."""
    venv, releases = torch_paths(directory)
    environments.make(venv, REQUIREMENTS)
    for name, requirement in RELEASES.items():
        if not (releases / name).exists():
            environments.make(venv, ["--no-deps", "--target", str(releases / name), requirement])


def missing_torch_env(directory: pathlib.Path | None) -> str | None:
    """Explains why PyTorch's forms cannot run, or returns None if they can."""
    venv, releases = torch_paths(directory or pathlib.Path())
    paths = [environments.interpreter(venv), *(releases / name for name in RELEASES)]
    return environments.missing(directory, paths, "torch-env")


def compare(contenders: Contenders, forms: Mapping[str, Form], directory: str) -> None:
    """Compares the loss and the gradients of every form with those of its baseline."""
    for name in dict.fromkeys(form.baseline for form in forms.values()):
        with noted(contenders.results[name]):
            contenders.ask(name, "save", name=name, directory=directory)
    for name, result in measurable(contenders.results):
        baseline = forms[name].baseline
        if contenders.results[baseline].problem is None:
            log(f"compares {name}")
            with noted(result):
                found = contenders.ask(name, "compare", name=name, directory=directory, baseline=baseline)
                result.loss, result.differences = found["loss"], found["differences"]
