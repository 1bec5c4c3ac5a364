"""The suite of contenders that race at several sizes: a declaration that `run` measures and reports."""

import abc
import argparse
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.harness import machine
from benchmarks.harness.report import Column, Report, conditions, join, problems, table, targets
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
    def how(self, fields: Mapping[str, Any]) -> list[str]:
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

    def markdown(self, fields: Mapping[str, Any], sizes: Iterable[Measured]) -> str:
        """Returns the conditions, and for each size its tables, notes and targets."""
        parts = conditions(fields, self.how(fields))
        for measured in sizes:
            parts += self.heading(measured.size)
            for title, columns, rows in self.tables(measured):
                parts += [f"{title}:", table(columns, rows)]
            parts += [*self.notes(measured), targets(self.checks(measured), self.other_clock)]
        return join(parts)

    def run(
        self,
        sizes: Sequence[Any],
        options: argparse.Namespace,
        settings: Mapping[str, Any],
        section: Section | None = None,
    ) -> Report:
        """Measures all sizes, and the section last; `settings` are fields of the report."""
        begun = {"machine": machine.describe(jax.devices(self.device)[0]), "rounds": options.rounds, **settings}
        fields: dict[str, Any] = {**begun, "versions": {}, "load": [machine.load(), None]}
        sizes_measured = []
        for size in sizes:
            measured, versions = self.measure(size, options)
            sizes_measured.append(measured)
            fields["versions"] |= versions
        fields["load"][1] = machine.load()
        text = self.markdown(fields, sizes_measured)
        if section is not None:
            more, added = section(options)
            fields |= more
            text += f"\n{added}"
        fields["sizes"] = [
            {**dataclasses.asdict(measured), "targets": [check.as_json() for check in self.checks(measured)]}
            for measured in sizes_measured
        ]
        wrong = [f"{one.size} {line}" for one in sizes_measured for line in failures(one.results, self.tolerances)]
        return Report(fields, text, wrong)
