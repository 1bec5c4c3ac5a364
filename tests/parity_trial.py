"""Scores the parity command on a folder of dumps: `python -m tests.parity_trial [FOLDER] [--only TEXT]`.

The folder has dumps and an `expected.json`, as `tests/kljax/parity/outside/README.md` describes.
"""

import argparse
import collections
import json
import math
import pathlib
import re
import sys
import time
from typing import Any, NamedTuple

import jax

from kljax.parity.causes import Cause
from kljax.parity.command import compare
from kljax.parity.comparison import ParityReport

FOLDER = pathlib.Path(__file__).parent / "kljax/parity/outside"
# A number of a cause is right within this relative difference.
TOLERANCE = 1e-3
# The shares of right dumps that the tests ask for; no dump may have a wrong cause.
BAR = {"clean": 1.0, "single": 0.95, "pair": 0.85}
KINDS = ("clean", "single", "pair")
NUMBER = re.compile(r"(?P<stage>\w+)\.(?P<setting>\w+) = (?P<value>\S+)")


class Score(NamedTuple):
    """How a report answers a dump: "right", "tied", "unknown", "missed" or "wrong", and the causes it names."""

    verdict: str
    named: tuple[str, ...]


def matches(cause: Cause, name: str) -> bool:
    """Tells whether a cause has a name of `expected.json`."""
    number = NUMBER.fullmatch(name)
    if number is None:
        return cause.key == name
    value = dict(cause.settings).get(number["setting"], dict(cause.arguments).get(number["setting"]))
    return (
        cause.stage == number["stage"]
        and isinstance(value, float)
        and math.isclose(value, float(number["value"]), rel_tol=TOLERANCE)
    )


def judge(report: ParityReport, planted: list[list[str]]) -> Score:
    """Compares the causes of a report with the planted faults."""
    named = report.causes
    right = [cause for cause in named if any(matches(cause, name) for names in planted for name in names)]
    complete = all(any(matches(cause, name) for cause in named for name in names) for names in planted)
    unknown = [finding for finding in report.findings if not finding.explanations and not finding.follows]
    shown = tuple(cause.key for cause in named) + tuple(f"unknown {f.difference.field}" for f in unknown)
    if complete and len(right) == len(named) and not unknown:
        return Score("right", shown)
    if all(_among(finding.explanations, planted) for finding in report.findings if finding.explanations):
        possible = [cause for finding in report.findings for causes in finding.explanations for cause in causes]
        if not unknown and all(any(matches(c, name) for c in possible for name in names) for names in planted):
            return Score("tied", shown)
        return Score("missed" if named else "unknown", shown)
    return Score("wrong", shown)


def _among(explanations: tuple[tuple[Cause, ...], ...], planted: list[list[str]]) -> bool:
    """Tells whether one of the explanations names planted faults alone."""
    names = [name for faults in planted for name in faults]
    return any(all(any(matches(cause, name) for name in names) for cause in causes) for causes in explanations)


def dumps(folder: pathlib.Path = FOLDER) -> list[dict[str, Any]]:
    """Lists the dumps of a folder; none without an `expected.json`."""
    path = folder / "expected.json"
    listed: list[dict[str, Any]] = json.loads(path.read_text())["dumps"] if path.exists() else []
    return listed


def kind_of(dump: dict[str, Any]) -> str:
    """Returns "clean", "single" or "pair"."""
    return KINDS[min(len(dump["causes"]), 2)]


def score(dump: dict[str, Any], folder: pathlib.Path = FOLDER) -> Score:
    """Runs the command on a dump."""
    with jax.enable_x64(True):
        return judge(compare(folder / dump["file"]), dump["causes"])


def main() -> int:
    """Prints the dumps that are not right, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=FOLDER)
    parser.add_argument("--only", default="", help="only dumps whose file name has this text in it")
    options = parser.parse_args()
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for dump in dumps(options.folder):
        if options.only not in dump["file"]:
            continue
        start = time.process_time()
        result = score(dump, options.folder)
        table[kind_of(dump)].update([result.verdict, "total"])
        if result.verdict != "right":
            wanted = ", ".join(" or ".join(names) for names in dump["causes"]) or "nothing"
            answer = f"{result.verdict}; planted {wanted}; named {result.named}"
            print(f"{dump['file']}: {answer}; {time.process_time() - start:.0f} s", flush=True)
    print("| dumps | right | a tie has it | unknown or in part | a wrong cause |")
    print("|---|---|---|---|---|")
    for kind in KINDS:
        counts = table[kind]
        columns = (counts["right"], counts["tied"], counts["unknown"] + counts["missed"], counts["wrong"])
        print(f"| {counts['total']} {kind} | " + " | ".join(map(str, columns)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
