"""The command line that both races share."""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import _machine
from benchmarks._speed import environments, race, table
from benchmarks._speed.work import QUICK, Work

VOCABS = (4096, 32_768)
Further = Callable[[argparse.Namespace], tuple[dict[str, Any], list[str]]]


def parser(prog: str, description: str, names: Sequence[str]) -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--vocab", action="append", type=_positive, metavar="V",
                       help=f"vocabulary, repeatable; {' and '.join(map(str, VOCABS))}")  # fmt: skip
    found.add_argument("--rounds", type=_positive, default=10)
    found.add_argument("--contenders", type=lambda text: text.split(","), default=list(names),
                       help=f"names separated by commas, of {', '.join(names)}; kljax is always one")  # fmt: skip
    found.add_argument("--envs", type=pathlib.Path, metavar="DIR", help="made with --make-envs")
    found.add_argument("--against", type=pathlib.Path, metavar="CHECKOUT",
                       help="another checkout of this repository, to race against")  # fmt: skip
    found.add_argument("--make-envs", type=pathlib.Path, metavar="DIR", help="make them, and do nothing else")
    found.add_argument("--python312", metavar="PATH", help="for Tunix's environment, with --make-envs")
    found.add_argument("--torch-index", help="package index for PyTorch in place of PyPI, with --make-envs")
    found.add_argument("--quick", action="store_true", help="a smoke test: a tiny model, two rounds")
    found.add_argument("--threads", type=int, default=2, help="of each process; 0 leaves them as they are")
    found.add_argument("--no-peak", action="store_true", help="leave out peak memory")
    found.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write everything that was measured")
    found.add_argument("--markdown", type=pathlib.Path, metavar="PATH", help="write the table, which is printed anyway")
    return found


def main(options: argparse.Namespace, found: argparse.ArgumentParser, part: str, further: Further | None = None) -> int:
    """Measures, prints, writes; the status is 1 if a contender failed or computes something else.

    Args:
      options: of the command line; found: what parsed them; part: of a run.
      further: measures something else after it, and returns it as plain data and as lines of Markdown.
    """
    if options.make_envs is not None:
        environments.make(options.make_envs, python312=options.python312, torch_index=options.torch_index)
        print(f"made; now: {found.prog} --envs {options.make_envs}")
        return 0
    if options.against is not None and not (options.against / "benchmarks" / "_speed" / "worker.py").exists():
        found.error(f"argument --against: got {options.against}, expected a checkout of this repository")
    unknown = sorted(set(options.contenders) - set(race.TITLES))
    if unknown:
        found.error(f"argument --contenders: got {unknown}, expected some of {sorted(race.TITLES)}")
    if options.threads and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    report, sizes = _measure(options, part)
    text = table.markdown(report, sizes, part)
    more, lines = further(options) if further is not None else ({}, [])
    text += "".join(f"{line}\n" for line in lines)
    print(text, end="")
    found_json = {
        **report,
        **more,
        "sizes": [
            {**race.as_json(one), "targets": [dataclasses.asdict(check) for check in table.check(one, part)]}
            for one in sizes
        ],
    }
    _write(options.markdown, text)
    _write(options.json, json.dumps(found_json, indent=1) + "\n")
    wrong = [f"V={one.work.vocab} {line}" for one in sizes for line in race.errors(one)]
    for line in wrong:
        print(f"ERROR {line}", file=sys.stderr)
    return 1 if wrong else 0


def _measure(options: argparse.Namespace, part: str) -> tuple[dict[str, Any], list[race.Measured]]:
    import jax

    others = [] if options.against is None else [race.OTHER]
    others += [name for name in options.contenders if name not in ("kljax", race.OTHER)]
    plan = race.Plan(
        part=part,
        names=("kljax", *others),
        against=options.against,
        envs=options.envs,
        rounds=min(options.rounds, 2) if options.quick else options.rounds,
        threads=options.threads,
        peak=not options.no_peak,
    )
    works = [QUICK] if options.quick else [Work(vocab=vocab) for vocab in options.vocab or VOCABS]
    versions: dict[str, str] = {}
    before, sizes = _machine.load(), []
    for work in works:
        measured, found = race.measure(work, plan)
        sizes.append(measured)
        versions |= found
    report = {
        "machine": _machine.describe(jax.devices("cpu")[0]),
        "rounds": plan.rounds,
        "threads": plan.threads,
        "versions": versions,
        "load": [before, _machine.load()],
    }
    return report, sizes


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive number")
    return int(text)


def _write(path: pathlib.Path | None, text: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
