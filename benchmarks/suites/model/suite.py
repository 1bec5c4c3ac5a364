"""Races of whole models: agreement first, then time in interleaved rounds, then memory."""

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.harness import cli, instructions, machine
from benchmarks.harness.environments import Environment
from benchmarks.harness.measure import relative_distance
from benchmarks.harness.process import Remote, start
from benchmarks.harness.race import Contenders, log, measurable, noted, race
from benchmarks.harness.report import ALL, Check, Measured, Report, Target, ratio, table
from benchmarks.suites.model.kljax import save_weights
from benchmarks.suites.model.problem import QUICK, ModelWork

VOCABS = (4096, 32_768)
TITLES = {"kljax": "kljax", "tunix": "Tunix", "transformers": "transformers `generate`"}
# Log-probs in nats: float32 rounding through the layers leaves 1e-5. Effect of one update, relative: the first step of
# AdamW is the sign of a gradient, also of a gradient that is rounding.
TOLERANCES = {"log-probs": 1e-3, "update": 0.05}
# glibc's malloc keeps freed buffers, so that a second run seems to need no memory. These settings return them at once,
# which costs time: they apply where no clock runs.
RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
ENVIRONMENTS = {
    "tunix": Environment("envs", "tunix", [("google-tunix==0.1.7",), ("jax==0.12.0.1", "flax==0.12.12")]),
    "transformers": Environment("envs", "torch", [("torch==2.13.0", "transformers==5.23.0", "numpy==2.4.6")]),
}

# The parts of a step, with title and the values that are compared; "rollout" has the first alone.
PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "rollout": ("Rollout", ("log-probs",)),
    "update": ("Update", ("log-probs", "update")),
    ALL: ("Rollout and update", ()),
}
TARGETS = {
    "rollout": (
        Target("speed", "kljax", "tunix", 2.0, part="rollout"),
        Target("speed", "kljax", "transformers", 3.0, part="rollout"),
    ),
    "step": (
        Target("speed", "kljax", "tunix", 2.2, part="update"),
        Target("peak", "kljax", "tunix", 0.25, part="update"),
        Target("speed", "kljax", "tunix", 2.5),
    ),
}
COLUMNS = (
    ("contender", ""),
    *(("wall s", ".3g"), ("tokens/s", ",.0f"), ("kljax is faster by", ".2f")),
    *(("CPU s", ".3g"), ("tokens/CPU s", ",.0f"), ("kljax is faster by", ".2f")),
)
DIFFERENCES = {"log-probs": ".0e", "update": ".1%"}


def command(
    part: str, name: str, description: str | None, contenders: Sequence[str]
) -> tuple[Callable[..., Report], Callable[..., int]]:
    """Returns `report` and `main` of the race of a part."""
    isa = f"race under each of these instruction sets: {','.join(instructions.TITLES)}"
    made = functools.partial(report, part=part)
    main = cli.command(
        name, description, functools.partial(measure, part=part), made,
        *cli.race_options("envs", rounds=10, quick="a tiny model, two rounds"),
        cli.option("--contenders", type=cli.some_of(TITLES), default=contenders, metavar="NAMES",
                   help=f"out of {','.join(contenders)}"),
        cli.option("--vocab", action="append", type=cli.positive, metavar="V",
                   help=f"vocabulary, repeatable; {' and '.join(map(str, VOCABS))}"),
        cli.option("--python312", default="python3.12", metavar="PATH", help="for Tunix, with --make-envs"),
        cli.option("--isa", type=cli.some_of(instructions.TITLES), default=(), metavar="NAMES", help=isa),
    )  # fmt: skip
    return made, main


def measure(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """Races the contenders of "rollout", or of "step" with the update on it; or makes their environments."""
    if options.make_envs is not None:
        if shutil.which(options.python312) is None:
            raise cli.OptionError(f"argument --python312: {options.python312} is missing, which Tunix needs")
        ENVIRONMENTS["tunix"].make(options.make_envs, options.python312)
        ENVIRONMENTS["transformers"].make(options.make_envs)
        raise cli.EndError(f"made; now give --envs {options.make_envs}", status=0)
    options.rounds = min(options.rounds, 2) if options.quick else options.rounds
    cli.limit_threads(options.threads)
    jax.config.update("jax_platforms", "cpu")
    lacking = instructions.lacking(options.isa)
    settings = {"rounds": options.rounds, "threads": options.threads, "lacking": lacking}
    fields = machine.conditions("cpu") | settings | {"sizes": []}
    limits = [name for name in options.isa if name not in lacking] or [""]
    works = [QUICK] if options.quick else [ModelWork(vocab=vocab) for vocab in options.vocab or VOCABS]
    for work in [dataclasses.replace(work, isa=isa) for work in works for isa in limits]:
        measured, versions = _race(work, options, part)
        fields["versions"] |= versions
        fields["sizes"].append(measured.as_json(checks(measured, part)))
    return fields


def _race(work: ModelWork, options: argparse.Namespace, part: str) -> tuple[Measured, dict[str, str]]:
    names = ["kljax", *(name for name in options.contenders if name != "kljax")]
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        directory = pathlib.Path(scratch)
        save_weights(work, directory)
        begin = functools.partial(process, work, directory, options)
        contenders = Contenders({name: name for name in names}, begin)
        versions = contenders.begin(stack)
        compare_log_probs(contenders, directory)
        if part == "step":
            compare_updates(contenders, directory)
        race(contenders.results, options.rounds, lambda name: contenders.ask(name, "run", part=part))
        for name, result in measurable(contenders.results):
            log(f"{name}: measures memory")
            with noted(result), begin(name, RETURN_AT_ONCE) as remote:
                remote.ask(do="run", part=part)
                result.peak_bytes = remote.ask(do="peak", part=part)
    return Measured(work, contenders.results), versions


def checks(measured: Measured, part: str) -> list[Check]:
    """Compares the results of a model with the targets."""
    bounded = []
    for target in TARGETS[part]:
        kind, unit = ("peak memory", "") if target.measure == "peak" else ("speed", ", in CPU seconds")
        title = f"{PARTS[target.part][0].lower()}: {kind} of kljax over {TITLES[target.against]}{unit}"
        bounded.append(target.check(title + instructions.title(measured.size.isa), measured.results))
    return bounded


def report(fields: Mapping[str, Any], part: str) -> Report:
    """Makes the report of a race."""
    how = [
        f"{fields['threads'] or 'all'} threads of each process",
        f"the fastest of {fields['rounds']} interleaved rounds",
        *(f"without {instructions.TITLES[name]}, which it lacks" for name in fields.get("lacking", ())),
    ]
    parts, failures = list[Report](), list[str]()
    for measured in (Measured.read(size, ModelWork) for size in fields["sizes"]):
        work = measured.size
        paragraphs = list[str]()
        for name, (title, compared) in PARTS.items() if part == "step" else [("rollout", PARTS["rollout"])]:
            columns = [*COLUMNS, *([] if name == ALL else [("peak MiB", "MiB")])]
            columns += [(f"{value} differ by", DIFFERENCES[value]) for value in compared]
            paragraphs += [f"{title}:", table(columns, _rows(measured, name, compared))]
        sizes = (
            f"{work.layers} layers, width {work.width}, {work.heads} heads x {work.head_dim}, {work.kv_heads} KV "
            f"heads, MLP {work.mlp_width}, float32; {work.prompts} prompts x {work.samples} completions, "
            f"{work.prompt_length} + {work.completion_length} tokens."
        )
        heading = f"### V={work.vocab:,}{instructions.title(work.isa)}"
        paragraphs = [heading, sizes, *paragraphs, *measured.problems(TITLES)]
        parts.append(Report(paragraphs, checks(measured, part), "by the other clock"))
        failures += measured.failures(TOLERANCES)
    return Report(parts, fields=fields, how=how, failures=failures)


def _rows(measured: Measured, part: str, compared: Sequence[str]) -> Iterator[list[Any]]:
    baseline = measured.results["kljax"]
    work = measured.size
    tokens = work.rows * (work.completion_length if part == "rollout" else work.length)
    for _, result in measurable(measured.results):
        if result.best("wall", part) is not None:
            row: list[Any] = [TITLES[result.name] + instructions.title(work.isa)]
            for clock in ("wall", "cpu"):
                seconds = result.best(clock, part)
                faster = None if result is baseline else ratio(seconds, baseline.best(clock, part))
                row += [seconds, ratio(tokens, seconds), faster]
            row += [] if part == ALL else [result.peak_bytes.get(part)]
            yield [*row, *(result.differences.get(name) for name in compared)]


@contextlib.contextmanager
def process(
    work: ModelWork, directory: pathlib.Path, options: argparse.Namespace, name: str, settings: Mapping[str, str] = {}
) -> Iterator[Remote]:
    """Starts the process of a contender, which loads the weights of the directory."""
    python = ENVIRONMENTS[name].find(options.envs) if name in ENVIRONMENTS else None
    settings = {"JAX_PLATFORMS": "cpu", **instructions.settings(work.isa), **settings}
    with start(f"benchmarks.suites.model.{name}", python=python, settings=settings) as remote:
        remote.ask(do="load", work=dataclasses.asdict(work), directory=str(directory), threads=options.threads)
        yield remote


def compare_log_probs(contenders: Contenders, directory: pathlib.Path) -> None:
    """Compares the log-probs of the same sequences with kljax's."""
    log("compares log-probs")
    for name, result in measurable(contenders.results):
        with noted(result):
            contenders.ask(name, "score", path=str(directory / f"{name}.npy"))
            if name != "kljax":
                log_probs, expected = (np.load(directory / f"{writer}.npy") for writer in (name, "kljax"))
                result.differences["log-probs"] = float(np.max(np.abs(log_probs - expected)))


def compare_updates(contenders: Contenders, directory: pathlib.Path) -> None:
    """Compares the first update of other learners with that of kljax on the same batch, by its effect on log-probs."""
    for name, result in measurable(contenders.results):
        if name == "kljax":
            continue
        path = directory / f"{name}.npz"
        with noted(result):
            log(f"{name}: compares one update")
            contenders.ask(name, "learn", path=str(path))
            contenders.ask("kljax", "learn", path=str(path))
            before = np.load(directory / "kljax.npy")
            with np.load(path) as file:
                result.differences["update"] = relative_distance(file["score"] - before, file["ours"] - before)
