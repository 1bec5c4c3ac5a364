"""`python -m kljax systems`: what each name of the PyTorch systems means here."""

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from kljax.systems import _text
from kljax.systems._compare import as_data, compare, named
from kljax.systems._lookup import rows
from kljax.systems._row import SYSTEMS, Row


class Mistake(Exception):
    """What the user asked for is not there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a system, system/name, or a name; none for all systems"
    )
    parser.add_argument("--compare", metavar="NAME", help="what this name means in each system, with numbers")
    parser.add_argument("--json", action="store_true", help="rows as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints what was asked for; returns the exit code: 0, or 2 for a name that no system has."""
    try:
        lines = list(_comparison(args) if args.compare is not None else _rows(args))
    except Mistake as error:
        print(f"kljax systems: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _comparison(args: argparse.Namespace) -> Iterable[str]:
    system, _, rest = args.compare.partition("/")
    name = rest if system in SYSTEMS and rest else args.compare
    if args.name is not None:
        raise Mistake("give a NAME or --compare NAME, not both")
    if not named(name):
        raise Mistake(unknown(name))
    return [json.dumps(as_data(name), indent=2)] if args.json else compare(name)


def _rows(args: argparse.Namespace) -> Iterable[str]:
    chosen = select(args.name)
    if not chosen:
        raise Mistake(unknown(args.name))
    if args.json:
        return [json.dumps([as_json(row) for row in chosen], indent=2)]
    if args.name is None:
        return _text.overview(chosen)
    return _text.of_system(chosen) if args.name in SYSTEMS else _each(chosen)


def select(name: str | None) -> list[Row]:
    """The rows of a system, of `system/name`, of a name with its flags, or all of them."""
    if name is None or name in SYSTEMS:
        return list(rows(system=name))
    exact = [row for row in rows() if row.key == name]
    return exact or named(name)


def unknown(name: str) -> str:
    """The line for a name that no row has."""
    system = name.partition("/")[0]
    if "/" in name and system in SYSTEMS:
        known = [row.key for row in rows(system=system)]
    else:
        known = [*SYSTEMS, *(row.name for row in rows()), *(row.key for row in rows())]
    close = list(dict.fromkeys(difflib.get_close_matches(name, known, n=6, cutoff=0.5)))
    hint = f"; did you mean {', '.join(map(repr, close[:3]))}?" if close else ""
    return f"got {name!r}, which is no system ({', '.join(SYSTEMS)}) and no name of one{hint}"


def as_json(row: Row) -> dict[str, Any]:
    """A row as plain data."""
    fields = {name: getattr(row, name) for name in ("meaning", "option", "clamps", "divisors", "gradient", "defaults")}
    return {
        "system": row.system,
        "version": row.version or SYSTEMS[row.system].version,
        "kind": row.kind,
        "name": row.name,
        "call": _call_as_json(row.call) if row.call else None,
        "given": dict(row.given),
        **fields,
        "note": row.note,
        "recorded": [{"function": golden.function, "params": dict(golden.params)} for golden in row.goldens],
        "reason": row.reason,
    }


def _call_as_json(call: Any) -> dict[str, Any]:
    steps = {name: [_call_as_json(step) for step in getattr(call, name)] for name in ("times", "plus", "then")}
    return {"function": call.function, "arguments": dict(call.arguments), "scale": call.scale, **steps}


def _each(chosen: Iterable[Row]) -> Iterator[str]:
    for number, row in enumerate(chosen):
        if number:
            yield ""
        yield from _text.details(row)
