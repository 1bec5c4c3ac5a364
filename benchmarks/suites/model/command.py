"""The command line of `benchmarks.rollout` and `benchmarks.train_step`."""

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.harness import cli, machine
from benchmarks.harness.results import failures
from benchmarks.suites.model import report, suite
from benchmarks.suites.model.problem import QUICK, Work

VOCABS = (4096, 32_768)
# Measures something else after the race: returns fields of the report, and lines of Markdown.
Section = Callable[[argparse.Namespace], tuple[dict[str, Any], list[str]]]


def make_parser(command: str, description: str | None, contenders: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of a command."""
    parser = cli.make_parser(command, description)
    parser.add_argument("--vocab", action="append", type=cli.positive, metavar="V",
                       help=f"vocabulary, repeatable; {' and '.join(map(str, VOCABS))}")  # fmt: skip
    parser.add_argument("--envs", type=pathlib.Path, metavar="DIR", help="made with --make-envs")
    parser.add_argument("--make-envs", type=pathlib.Path, metavar="DIR", help="make them, and measure nothing")
    parser.add_argument("--python312", metavar="PATH", help="for Tunix's environment, with --make-envs")
    parser.add_argument("--against", type=pathlib.Path, metavar="CHECKOUT",
                       help="another checkout of this repository, to race against")  # fmt: skip
    cli.add_race_options(parser, rounds=10, quick="a tiny model, two rounds")
    parser.set_defaults(contenders=tuple(contenders))
    return parser


def main(options: argparse.Namespace, parser: argparse.ArgumentParser, part: str, section: Section | None) -> int:
    """Measures, prints and writes; returns 1 if a contender failed or differs from kljax.

    Args:
      options: of the command line; parser: their parser; part: of a run; section: is measured last.
    """
    if options.make_envs is not None:
        suite.make_envs(options.make_envs, python312=options.python312, torch_index=options.torch_index)
        print(f"made; now: {parser.prog} --envs {options.make_envs}")
        return 0
    _check(options, parser)
    options.rounds = min(options.rounds, 2) if options.quick else options.rounds
    cli.limit_threads(options.threads)
    jax.config.update("jax_platforms", "cpu")
    result = machine.begin(jax.devices("cpu")[0], rounds=options.rounds, threads=options.threads)
    sizes = []
    for work in [QUICK] if options.quick else [Work(vocab=vocab) for vocab in options.vocab or VOCABS]:
        measured, versions = suite.measure(work, part, options)
        sizes.append(measured)
        result["versions"] |= versions
    machine.end(result)
    text = report.markdown(result, sizes, part)
    fields, lines = ({}, []) if section is None else section(options)
    text += "".join(f"{line}\n" for line in lines)
    result |= fields
    result["sizes"] = [
        {**one.as_json(), "targets": [check.as_json() for check in report.checks(one, part)]} for one in sizes
    ]
    wrong = [f"V={one.work.vocab} {line}" for one in sizes for line in failures(one.results, suite.TOLERANCES)]
    return cli.finish(options, text, result, wrong)


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the command if an option is wrong."""
    known = sorted(set(suite.TITLES) - {suite.OTHER})
    unknown = sorted(set(options.contenders) - set(known))
    if unknown:
        parser.error(f"argument --contenders: got {unknown}, expected some of {known}")
    if options.rounds < 1:
        parser.error(f"argument --rounds: got {options.rounds}, expected 1 or more")
    if options.against is not None and not (options.against / "benchmarks" / "train_step.py").exists():
        parser.error(f"argument --against: got {options.against}, expected a checkout of this repository")
