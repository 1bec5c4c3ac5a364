"""`python -m kljax systems`: looks up and compares the names of the PyTorch systems."""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from kljax.systems._call import Call
from kljax.systems._entry import Entry
from kljax.systems._lookup import did_you_mean, entries, find_by_function
from kljax.systems._table import SYSTEMS
from kljax.tools.systems import text
from kljax.tools.systems.compare import compare, comparison_as_json, find_by_name
from kljax.tools.systems.foreign import FOREIGN
from kljax.tools.systems.migration import as_yaml, read_config, translate
from kljax.tools.systems.options import find_option


class UsageError(Exception):
    """A request that no entry of the table answers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a system, system/name, a name, a function of a system such as kl_penalty, or an option such as "
        "kl_loss_type, also as --kl-loss-type; omit for all systems",
    )
    parser.add_argument("--compare", metavar="NAME", help="compare the meanings of this name, with numbers")
    parser.add_argument("--json", action="store_true", help="print entries as JSON")
    parser.add_argument(
        "--from",
        dest="source",
        nargs=2,
        metavar=("SYSTEM", "CONFIG"),
        help=f"print the config of this trainer for that of {', '.join(FOREIGN)}; options without a field are comments",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the entries or the comparison.

    Args:
      args: of the command line; `option` is a flag of a system, with dashes, or None.

    Returns:
      The exit code: 0, or 2 for a request that no entry answers, with the error on stderr.
    """
    try:
        if args.source is not None:
            lines = list(_config_lines(args))
        else:
            lines = list(_compare_lines(args) if args.compare is not None else _entry_lines(args))
    except UsageError as error:
        print(f"kljax systems: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _config_lines(args: argparse.Namespace) -> Iterable[str]:
    system, path = args.source
    if args.name is not None or args.compare is not None or args.json:
        raise UsageError("give --from SYSTEM CONFIG alone")
    if system not in FOREIGN:
        raise UsageError(
            f"--from: got {system!r}, expected one of {', '.join(FOREIGN)}{did_you_mean(system, [*FOREIGN])}"
        )
    try:
        config = read_config(pathlib.Path(path))
        return as_yaml(system, translate(system, config))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--from: {error}; expected {FOREIGN[system].file}") from error


def _compare_lines(args: argparse.Namespace) -> Iterable[str]:
    system, _, rest = args.compare.partition("/")
    name = rest if system in SYSTEMS and rest else args.compare
    if args.name is not None:
        raise UsageError("give a NAME or --compare NAME, not both")
    if not find_by_name(name):
        raise UsageError(unknown(name))
    return [json.dumps(comparison_as_json(name), indent=2)] if args.json else compare(name)


def _entry_lines(args: argparse.Namespace) -> Iterable[str]:
    selected = select(args.name) if args.option is None else []
    uses = [] if selected else find_option(args.option or args.name)
    if uses and args.option and args.name:
        named = [entry for use in uses for entry in use.entries if args.name == entry.name and not use.argument]
        selected = named
        uses = [] if named else uses
    if uses and not args.json:
        return text.of_option(uses)
    selected = selected or list({id(entry): entry for use in uses for entry in use.entries}.values())
    if not selected:
        raise UsageError(unknown(args.option or args.name))
    if args.json:
        return [json.dumps([entry_as_json(entry) for entry in selected], indent=2)]
    if args.name is None:
        return text.overview(selected)
    return text.of_system(selected) if args.name in SYSTEMS else _details_of_each(selected)


def select(name: str | None) -> list[Entry]:
    """Selects the entries of a system, of `system/name`, of a name with its flags, of a function, or all of them.

    Args:
      name: a system, `system/name`, a name or a function, tried in this order; None selects every entry.

    Returns:
      The entries; an empty list if the name finds none.
    """
    if name is None or name in SYSTEMS:
        return list(entries(system=name))
    exact = [entry for entry in entries() if entry.key == name]
    return exact or find_by_name(name) or find_by_function(name)


def unknown(name: str) -> str:
    """Writes the error for a name without an entry, with the names that contain it or are spelled almost like it.

    Returns:
      One line, with the kinds of names that are expected.
    """
    known = [*SYSTEMS, *(entry.name for entry in entries()), *(entry.key for entry in entries())]
    hint = did_you_mean(name, known)
    expected = f"a system ({', '.join(SYSTEMS)}), system/name, a name, a function, or an option"
    return f"NAME: got {name!r}, expected {expected}{hint}"


def entry_as_json(entry: Entry) -> dict[str, Any]:
    """Returns an entry as plain data.

    Returns:
      Values that `json.dumps` takes; `call` is None for an entry without a call.
    """
    texts = ("meaning", "option", "clamps", "divisors", "gradient", "defaults", "note", "reason", "part")
    return {
        "system": entry.system,
        "version": entry.version or SYSTEMS[entry.system].version,
        "kind": entry.kind,
        "name": entry.name,
        "call": _call_as_json(entry.call) if entry.call else None,
        "sources": dict(entry.sources),
        **{name: getattr(entry, name) for name in texts},
        "recorded": [{"function": golden.function, "params": dict(golden.params)} for golden in entry.goldens],
    }


def _call_as_json(call: Call) -> dict[str, Any]:
    steps = {name: [_call_as_json(step) for step in getattr(call, name)] for name in ("times", "plus", "then")}
    call_itself = {"function": call.function, "arguments": dict(call.arguments), "scale": call.scale}
    call_itself |= {"field": call.field} if call.field else {}
    return {**call_itself, "renamed": dict(call.renamed), **steps}


def _details_of_each(selected: Iterable[Entry]) -> Iterator[str]:
    for number, entry in enumerate(selected):
        if number:
            yield ""
        yield from text.details(entry)
