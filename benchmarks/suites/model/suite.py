"""Measures whole models: agreement first, then time in interleaved rounds, then memory."""

import argparse
import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.harness import environments
from benchmarks.harness.process import ROOT, Remote, start
from benchmarks.harness.race import MissingError, log, measurable, noted, race
from benchmarks.harness.results import Result
from benchmarks.suites.model.problem import Work, make_sequences, save_weights

# The contender of `--against`: kljax, as another checkout of this repository has it.
OTHER = "other"
TITLES = {
    "kljax": "kljax",
    OTHER: "kljax of the other checkout",
    "tunix": "Tunix",
    "transformers": "transformers `generate`",
}
# Log-probs in nats: float32 rounding through the layers leaves 1e-5. Effect of one update, relative: the first step of
# AdamW is the sign of a gradient, also of a gradient that is rounding.
TOLERANCES = {"log-probs": 1e-3, "update": 0.05}
# Fresh processes of each checkout that compile.
STARTS = 3
# glibc's malloc keeps freed buffers, so that a second run seems to need no memory. These settings return them at once,
# which costs time: they apply where no clock runs.
RETURN_AT_ONCE: Mapping[str, str] = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
)
FOLDERS = {"tunix": "tunix", "transformers": "torch"}
TUNIX = ("google-tunix==0.1.7",), ("jax==0.12.0.1", "flax==0.12.12")
TORCH, TRANSFORMERS = "torch==2.13.0", ("transformers==5.23.0", "numpy==2.4.6")


@dataclasses.dataclass
class WorkResults:
    """Measurements of one model."""

    work: Work
    results: dict[str, Result]

    def as_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "WorkResults":
        """Reads the plain data of `as_json`."""
        return cls(Work(**fields["work"]), {name: Result(**result) for name, result in fields["results"].items()})


def interpreter(directory: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the interpreter of a contender's environment."""
    return environments.interpreter(directory / FOLDERS[name])


def make_envs(directory: pathlib.Path, *, python312: str | None, torch_index: str | None) -> None:
    """Makes the environments of Tunix and transformers.

    Args:
      python312: interpreter for Tunix; None looks for one.
      torch_index: package index for PyTorch in place of PyPI, whose build for Linux has CUDA in it; the index of the
        build for CPUs is `https://download.pytorch.org/whl/cpu`.

    Raises:
      FileNotFoundError: if there is no Python 3.12.
    """
    python = environments.find_python312(python312)
    if not interpreter(directory, "tunix").exists():
        environments.make(directory / FOLDERS["tunix"], *TUNIX, python=python)
    if not interpreter(directory, "transformers").exists():
        torch = [*(("--index-url", torch_index) if torch_index else ()), TORCH]
        environments.make(directory / FOLDERS["transformers"], torch, TRANSFORMERS)


@contextlib.contextmanager
def process(
    name: str, work: Work, directory: pathlib.Path, options: argparse.Namespace, settings: Mapping[str, str] = {}
) -> Iterator[Remote]:
    """Starts the process of a contender, which loads the weights of the directory.

    Raises:
      MissingError: if the environment of the contender was not made.
    """
    python, root = None, ROOT
    if name == OTHER:
        root = options.against.absolute()
    elif name != "kljax":
        python = interpreter(options.envs or pathlib.Path(), name)
        missing = environments.missing(options.envs, [python], "envs")
        if missing is not None:
            raise MissingError(missing)
    module = f"benchmarks.suites.model.{'kljax' if name == OTHER else name}"
    log(f"{name}: starts")
    with start(module, python=python, root=root, settings={"JAX_PLATFORMS": "cpu", **settings}) as remote:
        remote.ask(do="load", work=dataclasses.asdict(work), directory=str(directory), threads=options.threads)
        yield remote


def measure(work: Work, part: str, options: argparse.Namespace) -> tuple[WorkResults, dict[str, str]]:
    """Measures one model; returns the versions of the libraries too.

    Args:
      part: "rollout", or "step" for a rollout and the update on it; options: of the command line.
    """
    names = ["kljax", *([OTHER] if options.against else ()), *(n for n in options.contenders if n != "kljax")]
    results = {name: Result(name) for name in names}
    versions: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_weights(work, directory)
        remotes: dict[str, Remote] = {}
        for name, result in results.items():
            with noted(result):
                remotes[name] = stack.enter_context(process(name, work, directory, options))
                found = remotes[name].ask(do="versions")
                versions |= {f"{key} (other)": value for key, value in found.items()} if name == OTHER else found
                log(f"{name}: compares log-probs")
                remotes[name].ask(do="score", path=str(directory / f"{name}.npy"))
                if name != "kljax":
                    theirs, ours = (np.load(directory / f"{one}.npy") for one in (name, "kljax"))
                    result.differences["log-probs"] = float(np.max(np.abs(theirs - ours)))
        if part == "step":
            compare_updates(results, remotes, work, directory)
        race(results, options.rounds, lambda name: remotes[name].ask(do="run", part=part))
        if options.against:
            log("compares the time to compile")
            starts = 1 if options.quick else STARTS
            for name in (["kljax", OTHER, OTHER, "kljax"] * starts)[: 2 * starts]:
                with noted(results[name]), process(name, work, directory, options) as remote:
                    for key, (wall, cpu) in remote.ask(do="run", part=part).items():
                        results[name].first.setdefault(key, []).append((wall, cpu))
        for name, result in [] if options.no_peak else measurable(results):
            with noted(result), process(name, work, directory, options, RETURN_AT_ONCE) as remote:
                log(f"{name}: measures memory")
                remote.ask(do="run", part=part)
                result.peak_bytes = remote.ask(do="peak", part=part)
    return WorkResults(work, results), versions


def compare_updates(
    results: dict[str, Result], remotes: Mapping[str, Remote], work: Work, directory: pathlib.Path
) -> None:
    """Compares the first update of other learners with that of kljax on the same batch, by its effect on log-probs."""
    for name, result in measurable(results):
        if name == "kljax":
            continue
        path = directory / f"{name}.npz"
        with noted(result):
            log(f"{name}: compares one update")
            if name == OTHER:
                _learn_fixed_batch(remotes[name], work, path)
            else:
                remotes[name].ask(do="learn", path=str(path))
            remotes["kljax"].ask(do="learn", path=str(path))
            before = np.load(directory / "kljax.npy")
            with np.load(path) as file:
                theirs, ours = file["score"] - before, file["ours"] - before
            result.differences["update"] = float(np.linalg.norm(theirs - ours) / np.linalg.norm(ours))


def _learn_fixed_batch(remote: Remote, work: Work, path: pathlib.Path) -> None:
    """Does the first update of another checkout on a batch that is the same in every checkout."""
    tokens, advantages = make_sequences(work), np.resize(np.array([1, -1], np.float32), work.rows)
    np.savez(path, tokens=tokens, advantages=advantages, score=np.zeros(()))
    remote.ask(do="learn", path=str(path))
    with np.load(path) as file:
        learned = file["ours"]
    np.savez(path, tokens=tokens, advantages=advantages, score=learned)
