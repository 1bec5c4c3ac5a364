"""Time and memory of the LM head: kljax against naive JAX, Tunix, TRL, verl and Liger.

    python -m benchmarks.head --make-torch-env ENV     once; PyTorch and the releases, in an environment of their own
    python -m benchmarks.head --torch-env ENV --json PATH --markdown PATH
    python -m benchmarks.head --torch-env ENV --device gpu --dtype bf16 --size 16384x4096x151936

Before the command times a contender, it compares its loss and gradients with the naive form's; it fails if they
differ. All contenders run in the same rounds, PyTorch's in a second process. Temporary memory is the one that JAX's
compiler assigns. Peak memory is the growth of the resident set of a fresh process during one run (on a GPU, of the
memory that PyTorch allocates), less the gradients. A missed target does not fail the command.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax

from benchmarks.harness import cli, machine
from benchmarks.harness.environments import Environment
from benchmarks.harness.process import Remote, start
from benchmarks.harness.race import Contenders, log, measurable, noted, race
from benchmarks.harness.report import Check, Measured, Report, Target, ratio, table
from benchmarks.harness.worker import Worker
from benchmarks.suites.head import forms, jax_forms
from benchmarks.suites.head.forms import QUICK, SIZES, TITLES, Form, HeadOptions, Size

TORCH = Environment(
    "torch-env",
    "venv",
    [("torch==2.13.0", "numpy==2.4.6", "packaging==25.0")],
    releases={"trl": "trl==1.16.0", "verl": "verl==0.9.1", "liger_kernel": "liger-kernel==0.8.5"},
)
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
COLUMNS = (
    ("contender", ""),
    *(("wall s", ".3g"), ("of naive", ".2f"), ("CPU s", ".3g"), ("of naive", ".2f")),
    *(("temporary MiB", "MiB"), ("peak MiB", "MiB"), ("GFLOP/s", ",.0f")),
    *(("loss differs by", ".0e"), ("gradients differ by", ".0e")),
)


def race_forms(
    shared: HeadOptions,
    size: Size,
    names: Collection[str] | None,
    rounds: int,
    start_torch: Callable[[str], AbstractContextManager[Remote]],
    *,
    compared: Size | None = None,
    fresh: bool = True,
) -> tuple[Measured, dict[str, str]]:
    """Races the forms of a device, JAX's in this process; returns the versions of the libraries too.

    Loss and gradients are compared at the size `compared`, after which each process draws its larger arrays. Peak
    memory is measured `fresh`, each form in a process of its own, or only on a GPU.
    """
    log(f"{size}: makes the inputs")
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        jax_forms.make_inputs(compared or size).save(pathlib.Path(directory))
        arguments = {"inputs": directory, "options": dataclasses.asdict(shared)}

        def begin(framework: str) -> AbstractContextManager[Remote | Worker]:
            if framework == "torch":
                return start_torch(directory)
            worker = Worker(jax_forms.load)
            worker.ask(do="load", **arguments)
            return contextlib.nullcontext(worker)

        def peak(name: str) -> int | None:
            if not fresh:
                return contenders.ask(name, "device_peak", name=name) if shared.device != "cpu" else None
            log(f"measures the memory of {name}")
            with start_torch(directory) if chosen[name].framework == "torch" else started("jax", arguments) as remote:
                return remote.ask(do="peak", name=name)

        chosen = forms.choose(shared.device, names)
        contenders = Contenders({name: form.framework for name, form in chosen.items()}, begin)
        versions = contenders.begin(stack)
        compare(contenders, chosen, directory)
        for framework, process in contenders.remotes.items() if compared not in (None, size) else ():
            with contenders.noted_for(framework):
                process.ask(do="redraw", **dataclasses.asdict(size))
        for name, result in measurable(contenders.results):
            with noted(result):
                result.temp_bytes = contenders.ask(name, "temporary", name=name)
                grown = peak(name)
                result.peak_bytes = {} if grown is None else {"run": grown}
        if rounds:
            race(contenders.results, rounds, lambda name: contenders.ask(name, "run", name=name))
    return Measured(size, contenders.results), versions


@contextlib.contextmanager
def started(framework: str, arguments: Mapping[str, Any], python: pathlib.Path | None = None) -> Iterator[Remote]:
    """Starts a process of the forms of "jax" or "torch", which has loaded its arrays."""
    with start(f"benchmarks.suites.head.{framework}_forms", python=python) as remote:
        remote.ask(do="load", **arguments)
        yield remote


def compare(contenders: Contenders, chosen: Mapping[str, Form], directory: str) -> None:
    """Compares the loss and the gradients of every form with its baseline's."""
    for name in dict.fromkeys(form.baseline for form in chosen.values()):
        with noted(contenders.results[name]):
            contenders.ask(name, "save", name=name, directory=directory)
    for name, result in measurable(contenders.results):
        baseline = chosen[name].baseline
        if contenders.results[baseline].problem is None:
            log(f"compares {name}")
            with noted(result):
                compared = contenders.ask(name, "compare", name=name, directory=directory, baseline=baseline)
                result.loss, result.differences = compared["loss"], compared["differences"]


def checks(measured: Measured, device: str) -> list[Check]:
    """Compares the results of a size with the targets."""
    large = measured.size.vocab >= LARGE_VOCAB
    return [
        target.check(title(target), measured.results, large=large)
        for target in TARGETS[device]
        if target.name in measured.results
    ]


def title(target: Target) -> str:
    """Describes a target."""
    kinds = {"half": "half masked", "frozen": "frozen head", "lora": "frozen head, entropy", "kl": "exact KL"}
    kind = kinds.get(target.name.partition("_")[2])
    subject = TITLES[target.name] if kind is None else f"{TITLES[target.name]}, {kind}"
    without = target.name.endswith("_kl") and target.against == target.name.removesuffix("_kl")
    other = f"{TITLES[target.against]} without it" if without else TITLES[target.against]
    return f"{'memory' if target.measure == 'temporary' else target.measure}: {subject}, over {other}"


def report(fields: Mapping[str, Any]) -> Report:
    """Makes the report of a race; each group of forms is a table."""
    shared = HeadOptions(**fields["options"])
    rounds = fields["rounds"]
    how = [
        f"{shared.dtype} hidden states and head",
        *([f"{shared.threads or 'all'} threads"] if shared.device == "cpu" else []),
        f"the fastest of {rounds} interleaved rounds" if rounds else "memory and agreement only",
    ]
    tolerances = tolerances_of(shared)
    parts = list[Report]()
    failures = list[str]()
    for measured in (Measured.read(size, Size) for size in fields["sizes"]):
        size = measured.size
        meant = f"The targets below are meant for {' and '.join(map(str, SIZES))}."
        paragraphs = [f"### N={size.tokens:,} D={size.width:,} V={size.vocab:,}", *([] if size in SIZES else [meant])]
        for group, text in forms.GROUPS.items():
            shown = [form for form in forms.FORMS if form.group == group and form.name in measured.results]
            if shown:
                paragraphs += [
                    f"{text[0].upper()}{text[1:]}:",
                    table(COLUMNS, [_row(form, measured) for form in shown]),
                ]
        paragraphs += measured.problems(TITLES)
        parts.append(Report(paragraphs, checks(measured, shared.device), "in CPU seconds"))
        failures += measured.failures(tolerances)
    return Report(parts, fields=fields, how=how, failures=failures)


def tolerances_of(shared: HeadOptions) -> dict[str, float]:
    """Returns the largest differences from the baseline."""
    return dict.fromkeys(("loss", "gradients"), forms.TOLERANCE[shared.dtype])


def _row(form: Form, measured: Measured) -> list[Any]:
    result, naive = measured.results[form.name], measured.results[form.baseline]
    if result.problem is not None:
        return [form.title, "not measured", *[None] * 8]
    times = [value for clock in ("wall", "cpu")
             for value in (result.best(clock), ratio(result.best(clock), naive.best(clock)))]  # fmt: skip
    rate = ratio(form.matmuls * measured.size.flops / 1e9, result.best("wall"))
    differences = (result.differences.get(name) for name in ("loss", "gradients"))
    return [form.title, *times, result.temp_bytes, result.peak_bytes.get("run"), rate, *differences]


def torch_in(env: pathlib.Path | None, shared: HeadOptions, directory: str) -> AbstractContextManager[Remote]:
    """Starts the forms of PyTorch in their environment."""
    python = TORCH.find(env)
    releases = str(python.parents[2] / "releases")
    return started("torch", {"inputs": directory, "options": dataclasses.asdict(shared), "releases": releases}, python)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.make_torch_env is not None:
        TORCH.make(options.make_torch_env)
        raise cli.EndError(f"made; now give --torch-env {options.make_torch_env}", status=0)
    forms.choose(options.device, options.contenders)
    if options.quick:
        options.rounds, options.tile = min(options.rounds, 2), options.tile or forms.QUICK_TILE
    if options.device == "cpu":
        cli.limit_threads(options.threads)
    else:
        # PyTorch needs memory of the same GPU; JAX reads this when it starts the device.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if options.dtype == "float32":
            jax.config.update("jax_default_matmul_precision", "highest")  # the default of PyTorch
    shared = HeadOptions(options.device, options.dtype, options.threads, options.tile)
    torch = functools.partial(torch_in, options.torch_env, shared)
    fields = machine.conditions(options.device) | {"rounds": options.rounds, "options": vars(shared), "sizes": []}
    for size in [Size(*numbers) for numbers in options.size or ()] or ((QUICK,) if options.quick else SIZES):
        chosen = (shared, size, options.contenders, options.rounds)
        measured, versions = race_forms(*chosen, torch, fresh=not options.quick)
        fields["versions"] |= versions
        fields["sizes"].append(measured.as_json(checks(measured, shared.device)))
    return fields


main = cli.command(
    "head",
    __doc__,
    _measure,
    report,
    *cli.race_options("torch-env", rounds=5, quick=f"{QUICK}, two rounds, no peak memory"),
    cli.option("--contenders", type=cli.some_of(TITLES), metavar="NAMES", help="names separated by commas"),
    cli.option("--size", action="append", type=cli.numbers("2048x1024x32768"), metavar="NxDxV",
               help=f"tokens x width x vocabulary, repeatable; {' and '.join(map(str, SIZES))}"),
    cli.option("--device", choices=("cpu", "gpu"), default="cpu"),
    forms.DTYPE,
    cli.option("--tile", type=cli.numbers("2048x1024"), metavar="NxV", help="in place of kljax's default"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
