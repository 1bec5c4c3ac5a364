"""The suite of contenders that race at several sizes: a declaration that `run` measures, reports and writes."""

import abc
import argparse
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.harness import cli, machine
from benchmarks.harness.report import Column, conditions, join, problems, table, targets
from benchmarks.harness.results import Check, Measured, failures

# Title, columns and rows.
Table = tuple[str, Iterable[Column], Iterable[Sequence[Any]]]
# Measures something else after the race: returns fields of the report, and Markdown.
Section = Callable[[argparse.Namespace], tuple[dict[str, Any], str]]


class Suite(abc.ABC):
    """Contenders, tables and targets of a benchmark.

    Attributes:
      device: of JAX, "cpu" or "gpu".
      titles: of the contenders, by name.
      tolerances: largest difference from the baseline, by the name of the compared value.
      other_clock: title of the values by the other clock in the table of targets.
    """

    device = "cpu"
    titles: Mapping[str, str]
    tolerances: Mapping[str, float]
    other_clock: str

    @abc.abstractmethod
    def measure(self, size: Any, options: argparse.Namespace) -> tuple[Measured, dict[str, str]]:
        """Measures one size; returns the versions of the libraries too."""

    @abc.abstractmethod
    def how(self, report: Mapping[str, Any]) -> list[str]:
        """Returns the conditions of the measurement, as parts of a sentence."""

    @abc.abstractmethod
    def heading(self, size: Any) -> list[str]:
        """Returns the paragraphs before the tables of a size."""

    @abc.abstractmethod
    def tables(self, measured: Measured) -> Iterator[Table]:
        """Yields the tables of a size."""

    @abc.abstractmethod
    def checks(self, measured: Measured) -> list[Check]:
        """Compares the results of a size with the targets."""

    def notes(self, measured: Measured) -> list[str]:
        """Returns the paragraphs between the tables and the targets of a size."""
        return problems(measured.results.values(), self.titles)


def markdown(suite: Suite, report: Mapping[str, Any], sizes: Iterable[Measured]) -> str:
    """Returns the conditions, and for each size its tables, notes and targets."""
    parts = conditions(report, suite.how(report))
    for one in sizes:
        parts += suite.heading(one.size)
        for title, columns, rows in suite.tables(one):
            parts += [f"{title}:", table(columns, rows)]
        parts += [*suite.notes(one), targets(suite.checks(one), suite.other_clock)]
    return join(parts)


def run(
    suite: Suite,
    sizes: Sequence[Any],
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    section: Section | None = None,
) -> int:
    """Measures, prints and writes; returns 1 if a contender failed or differs from its baseline, else 0.

    Args:
      options: of the command line; settings: fields of the report; section: is measured last.
    """
    begun = {"machine": machine.describe(jax.devices(suite.device)[0]), "rounds": options.rounds, **settings}
    report: dict[str, Any] = {**begun, "versions": {}, "load": [machine.load(), None]}
    found = []
    for size in sizes:
        measured, versions = suite.measure(size, options)
        found.append(measured)
        report["versions"] |= versions
    report["load"][1] = machine.load()
    text = markdown(suite, report, found)
    if section is not None:
        fields, added = section(options)
        report |= fields
        text += f"\n{added}"
    report["sizes"] = [
        {**dataclasses.asdict(one), "targets": [check.as_json() for check in suite.checks(one)]} for one in found
    ]
    wrong = [f"{one.size} {line}" for one in found for line in failures(one.results, suite.tolerances)]
    return cli.finish(options, text, report, wrong)
