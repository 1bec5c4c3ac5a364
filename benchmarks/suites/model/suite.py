"""The suites of whole models: agreement first, then time in interleaved rounds, then memory."""

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from benchmarks.harness import cli, environments, instructions
from benchmarks.harness.measure import relative_distance
from benchmarks.harness.process import Remote, start
from benchmarks.harness.race import Contenders, MissingError, log, measurable, merged, noted, race
from benchmarks.harness.report import Report
from benchmarks.harness.results import ALL, Check, ContenderResult, Measured, Target, check, ratio
from benchmarks.harness.suite import Section, Suite, Table
from benchmarks.suites.model.kljax import save_weights
from benchmarks.suites.model.problem import QUICK, ModelWork

VOCABS = (4096, 32_768)
VOCAB = cli.option("--vocab", action="append", type=cli.positive, metavar="V",
                   help=f"vocabulary, repeatable; {' and '.join(map(str, VOCABS))}")  # fmt: skip
TITLES = {
    "kljax": "kljax",
    "tunix": "Tunix",
    "transformers": "transformers `generate`",
}
# Log-probs in nats: float32 rounding through the layers leaves 1e-5. Effect of one update, relative: the first step of
# AdamW is the sign of a gradient, also of a gradient that is rounding.
TOLERANCES = {"log-probs": 1e-3, "update": 0.05}
# glibc's malloc keeps freed buffers, so that a second run seems to need no memory. These settings return them at once,
# which costs time: they apply where no clock runs.
RETURN_AT_ONCE: Mapping[str, str] = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
)
FOLDERS = {"tunix": "tunix", "transformers": "torch"}
TUNIX = ("google-tunix==0.1.7",), ("jax==0.12.0.1", "flax==0.12.12")
TRANSFORMERS = ("torch==2.13.0", "transformers==5.23.0", "numpy==2.4.6")

Process = contextlib.AbstractContextManager[Remote]

PARTS = {"rollout": "Rollout", "update": "Update", ALL: "Rollout and update"}
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
MEASURES = {"speed": "speed", "peak": "peak memory"}
COLUMNS = (
    ("contender", ""),
    *(("wall s", ".3g"), ("tokens/s", ",.0f"), ("kljax is faster by", ".2f")),
    *(("CPU s", ".3g"), ("tokens/CPU s", ",.0f"), ("kljax is faster by", ".2f")),
)
PEAK = ("peak MiB", "MiB")
DIFFERENCES = {"log-probs": ".0e", "update": ".1%"}
# The compared values of each part.
COMPARED: Mapping[str, tuple[str, ...]] = {"rollout": ("log-probs",), "update": ("log-probs", "update"), ALL: ()}


class ModelSuite(Suite):
    """Contenders that sample with whole models, and update them.

    Args:
      part: "rollout", or "step" for a rollout and the update on it.
    """

    titles = TITLES
    tolerances = TOLERANCES
    other_clock = "by the other clock"

    def __init__(self, part: str) -> None:
        self.part = part
        self.parts = ("rollout",) if part == "rollout" else ("rollout", "update")

    def measure(self, size: ModelWork, options: argparse.Namespace) -> tuple[Measured, dict[str, str]]:
        names = ["kljax", *(name for name in options.contenders if name != "kljax")]
        with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
            directory = pathlib.Path(scratch)
            save_weights(size, directory)
            start = functools.partial(process, size, directory, options)
            contenders = Contenders({name: name for name in names}, start)
            versions = contenders.begin(stack)
            compare_log_probs(contenders, directory)
            if self.part == "step":
                compare_updates(contenders, directory)
            race(contenders.results, options.rounds, lambda name: contenders.ask(name, "run", part=self.part))
            self.measure_memory(contenders.results, start)
        return Measured(size, contenders.results), merged(versions)

    def measure_memory(self, results: Mapping[str, ContenderResult], start: Callable[..., Process]) -> None:
        """Measures peak memory in fresh processes."""
        for name, result in measurable(results):
            log(f"{name}: measures memory")
            with noted(result), start(name, RETURN_AT_ONCE) as remote:
                remote.ask(do="run", part=self.part)
                result.peak_bytes = remote.ask(do="peak", part=self.part)

    def how(self, fields: Mapping[str, Any]) -> list[str]:
        return [
            f"{fields['threads'] or 'all'} threads of each process",
            f"the fastest of {fields['rounds']} interleaved rounds",
            *(f"without {instructions.TITLES[name]}, which it lacks" for name in fields.get("lacking", ())),
        ]

    def heading(self, size: ModelWork) -> list[str]:
        return [
            f"### V={size.vocab:,}{instructions.title(size.isa)}",
            f"{size.layers} layers, width {size.width}, {size.heads} heads x {size.head_dim}, {size.kv_heads} KV "
            f"heads, MLP {size.mlp_width}, float32; {size.prompts} prompts x {size.samples} completions, "
            f"{size.prompt_length} + {size.completion_length} tokens.",
        ]

    def tables(self, measured: Measured) -> Iterator[Table]:
        ours, work = measured.results["kljax"], measured.size
        for part in self.parts if self.part == "rollout" else PARTS:
            tokens = work.new_tokens if part == "rollout" else work.tokens
            compared = [(f"{name} differ by", DIFFERENCES[name]) for name in COMPARED[part]]
            rows = []
            for result in measured.results.values():
                if result.problem is not None or result.best("wall", part) is None:
                    continue
                row: list[Any] = [TITLES[result.name] + instructions.title(work.isa)]
                for clock in ("wall", "cpu"):
                    seconds = result.best(clock, part)
                    faster = None if result is ours else ratio(seconds, ours.best(clock, part))
                    row += [seconds, ratio(tokens, seconds), faster]
                row += [] if part == ALL else [result.peak_bytes.get(part)]
                rows.append([*row, *(result.differences.get(name) for name in COMPARED[part])])
            yield PARTS[part], [*COLUMNS, *([] if part == ALL else [PEAK]), *compared], rows

    def checks(self, measured: Measured) -> list[Check]:
        isa = instructions.title(measured.size.isa)
        return [check(target, title(target) + isa, measured.results) for target in TARGETS[self.part]]


def title(target: Target) -> str:
    """Describes a target."""
    unit = "" if target.measure == "peak" else ", in CPU seconds"
    return f"{PARTS[target.part].lower()}: {MEASURES[target.measure]} of kljax over {TITLES[target.against]}{unit}"


def works_of(options: argparse.Namespace) -> list[ModelWork]:
    """Lists the models of a command line."""
    return [QUICK] if options.quick else [ModelWork(vocab=vocab) for vocab in options.vocab or VOCABS]


def options_of(contenders: Sequence[str]) -> list[cli.Option]:
    """Returns the options of a command."""
    isa = f"race under each of these instruction sets: {','.join(instructions.TITLES)}"
    return [
        *cli.race_options("envs", rounds=10, quick="a tiny model, two rounds"),
        cli.option("--contenders", type=cli.some_of(TITLES), default=contenders, metavar="NAMES",
                   help=f"out of {','.join(contenders)}"),
        VOCAB,
        cli.option("--python312", metavar="PATH", help="for Tunix's environment, with --make-envs"),
        cli.option("--isa", type=cli.some_of(instructions.TITLES), default=(), metavar="NAMES", help=isa),
    ]  # fmt: skip


def report(options: argparse.Namespace, part: str, section: Section | None) -> Report:
    """Races the contenders of a part, or makes their environments."""
    if options.make_envs is not None:
        make_envs(options.make_envs, options.python312)
        return Report({}, f"made; now give --envs {options.make_envs}\n")
    if options.rounds < 1:
        raise cli.OptionError(f"argument --rounds: got {options.rounds}, expected 1 or more")
    options.rounds = min(options.rounds, 2) if options.quick else options.rounds
    cli.limit_threads(options.threads)
    jax.config.update("jax_platforms", "cpu")
    lacking = instructions.lacking(options.isa)
    limits = [name for name in options.isa if name not in lacking] or [""]
    works = [dataclasses.replace(work, isa=isa) for work in works_of(options) for isa in limits]
    return ModelSuite(part).run(works, options, {"threads": options.threads, "lacking": lacking}, section)


def interpreter(directory: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the interpreter of a contender's environment."""
    return environments.interpreter(directory / FOLDERS[name])


def make_envs(directory: pathlib.Path, python312: str | None = None) -> None:
    """Makes the environments of Tunix and transformers; without `python312`, looks for one for Tunix.

    Raises:
      FileNotFoundError: if there is no Python 3.12.
    """
    python = environments.find_python312(python312)
    if not interpreter(directory, "tunix").exists():
        environments.make(directory / FOLDERS["tunix"], *TUNIX, python=python)
    if not interpreter(directory, "transformers").exists():
        environments.make(directory / FOLDERS["transformers"], TRANSFORMERS)


@contextlib.contextmanager
def process(
    work: ModelWork, directory: pathlib.Path, options: argparse.Namespace, name: str, settings: Mapping[str, str] = {}
) -> Iterator[Remote]:
    """Starts the process of a contender, which loads the weights of the directory.

    Raises:
      MissingError: if the environment of the contender was not made.
    """
    python = None
    if name != "kljax":
        python = interpreter(options.envs or pathlib.Path(), name)
        missing = environments.missing(options.envs, [python], "envs")
        if missing is not None:
            raise MissingError(missing)
    settings = {"JAX_PLATFORMS": "cpu", **instructions.settings(work.isa), **settings}
    with start(f"benchmarks.suites.model.{name}", python=python, settings=settings) as remote:
        remote.ask(do="load", work=dataclasses.asdict(work), directory=str(directory), threads=options.threads)
        yield remote


def compare_log_probs(contenders: Contenders, directory: pathlib.Path) -> None:
    """Compares the log-probs of the same sequences with those of kljax."""
    log("compares log-probs")
    for name, result in measurable(contenders.results):
        with noted(result):
            contenders.ask(name, "score", path=str(directory / f"{name}.npy"))
            if name != "kljax":
                theirs, ours = (np.load(directory / f"{one}.npy") for one in (name, "kljax"))
                result.differences["log-probs"] = float(np.max(np.abs(theirs - ours)))


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
