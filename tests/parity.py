"""Measures the parity command on recorded dumps: `python -m tests.parity [--detail full,loss] [--only NAME]`.

Each dump was recorded with the systems' own PyTorch functions (`tests/goldens/parity`): without a fault, or with a
planted one. A dump is read in full, or with the loss and its gradient as the only results.
"""

import argparse
import collections
import functools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from kljax.tools.parity.command import compare
from kljax.tools.parity.dump import FORMAT
from kljax.tools.parity.report import ParityReport

DIRECTORY = pathlib.Path(__file__).parent / "goldens/parity"
# `tests.goldens.parity.record` makes the first, `tests.goldens.presets.dump` the second.
FILES = ("dumps", "steps")
# The results that a short recorder does not have.
LOSS_ONLY = ("token_loss", "kl", "ratio", "weights", "metric/kl")


class Outcome(NamedTuple):
    """Whether the planted causes are the ones that are named.

    `named` is by the first explanation, `tied` by one of several that fit equally well, `extra` counts other causes.
    """

    named: bool
    tied: bool
    extra: tuple[str, ...]


@functools.cache
def _arrays() -> Mapping[str, np.ndarray]:
    return {name: array for file in FILES for name, array in np.load(DIRECTORY / f"{file}.npz").items()}


@functools.cache
def dumps() -> tuple[dict[str, Any], ...]:
    """The recorded dumps."""
    return tuple(dump for file in FILES for dump in json.loads((DIRECTORY / f"{file}.json").read_text())["dumps"])


def write_dump(path: pathlib.Path, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Writes an uncompressed `.npz` dump; the version of the schema is added to the header."""
    members: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    members["header"] = np.array(json.dumps({"kljax_parity": FORMAT, **header}))
    np.savez(path, **members)


def write(dump: Mapping[str, Any], path: pathlib.Path, *, detail: str = "full") -> None:
    """Writes a recorded dump as a file of the command."""
    arrays = {name: _arrays()[key] for name, key in dump["arrays"].items()}
    if detail == "loss":
        arrays = {name: array for name, array in arrays.items() if name not in LOSS_ONLY}
    write_dump(path, dump["header"], arrays)


def report_of(dump: Mapping[str, Any], *, detail: str = "full") -> ParityReport:
    """Runs the comparison on a recorded dump."""
    with tempfile.TemporaryDirectory() as directory, jax.enable_x64(True):
        path = pathlib.Path(directory) / "dump.npz"
        write(dump, path, detail=detail)
        return compare(path)


def judge(dump: Mapping[str, Any], report: ParityReport) -> Outcome:
    """Compares the named causes with the planted ones."""
    planted = [set(fault["causes"]) for fault in dump["planted"]]
    first = [{cause.key for cause in finding.explanations[:1]} for finding in report.findings]
    every = [{cause.key for cause in finding.explanations} for finding in report.findings]
    names, possible = set().union(*first), set().union(*every)
    open_findings = [finding for finding in report.findings if not finding.explanations and not finding.follows]
    unknown = tuple(f"unknown {finding.difference.field}" for finding in open_findings)
    known = set().union(*planted)
    extra: set[str] = set()
    for finding in report.findings:
        keys = [cause.key for cause in finding.explanations]
        if not known & {*keys}:
            extra |= {*keys[:1]}
    return Outcome(
        all(names & causes for causes in planted),
        all(possible & causes for causes in planted),
        (*sorted(extra), *unknown),
    )


def kind_of(dump: Mapping[str, Any]) -> str:
    """Clean or single."""
    return "single" if dump["planted"] else "clean"


def measure(detail: str, only: str) -> Iterator[tuple[dict[str, Any], Outcome, float]]:
    """Yields every dump with its outcome and its seconds."""
    for dump in dumps():
        if any(part in dump["name"] or part == kind_of(dump) for part in only.split(",")):
            start = time.monotonic()
            outcome = judge(dump, report_of(dump, detail=detail))
            yield dump, outcome, time.monotonic() - start


def main() -> int:
    """Prints the dumps that are not named, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detail", default="full,loss", help="full, loss, or both (%(default)s)")
    parser.add_argument("--only", default="", help="only dumps whose name has one of these parts in it")
    options = parser.parse_args()
    table: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for detail in options.detail.split(","):
        for dump, outcome, seconds in measure(detail, options.only):
            counts = table[detail, kind_of(dump)]
            counts.update(total=1, named=int(outcome.named and not outcome.extra), tied=int(outcome.tied))
            counts.update(extra=int(bool(outcome.extra)), seconds=round(seconds))
            if not outcome.named or outcome.extra:
                wanted = ", ".join(" or ".join(fault["causes"]) for fault in dump["planted"])
                state = "tied" if outcome.tied else "missed" if not outcome.named else "named"
                print(f"{detail} {dump['name']}: {state}; planted {wanted}; others {outcome.extra}", flush=True)
    print("| recorded | dumps | named first, nothing else | among the named | other causes |")
    print("|---|---|---|---|---|")
    for (detail, kind), counts in table.items():
        columns = (counts["named"], counts["tied"], counts["extra"])
        print(f"| {detail} | {counts['total']} {kind} | " + " | ".join(map(str, columns)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
