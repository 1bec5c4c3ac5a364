"""Writes entries as plain text of at most 100 columns."""

import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

import kljax
from kljax.systems._call import Call
from kljax.systems._entry import KINDS, Entry, Golden
from kljax.systems._lookup import require_call
from kljax.systems._table import SYSTEMS
from kljax.tools.systems.options import OptionUse

WIDTH = 100


def field(label: str, text: str, indent: int = 2, margin: int = 13) -> list[str]:
    """Writes a label, and its text wrapped beside it."""
    start = f"{' ' * indent}{label}".ljust(margin)
    lines = textwrap.wrap(text, WIDTH - margin, break_on_hyphens=False) or [""]
    return [f"{start if number == 0 else ' ' * margin}{line}".rstrip() for number, line in enumerate(lines)]


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Aligns columns to their widest cell: the first to the left, the others to the right."""
    cells = [list(header), *map(list, lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


def overview(entries: Sequence[Entry]) -> Iterator[str]:
    """Yields every system with its names by kind."""
    counted = f"{len(entries)} names of {len(SYSTEMS)} systems"
    yield f"{counted}; `python -m kljax systems NAME` explains one, a system, or system/name."
    for key, system in SYSTEMS.items():
        yield ""
        yield f"{key}: {system.title} {system.version}"
        yield from field("default KL", system.default_kl, margin=16)
        for kind, group in by_kind([entry for entry in entries if entry.system == key]):
            yield from field(kind, ", ".join(entry.name for entry in group), margin=16)


def of_system(entries: Sequence[Entry]) -> Iterator[str]:
    """Yields the names of one system, each with its call."""
    system = SYSTEMS[entries[0].system]
    yield f"{system.key}: {system.title} {system.version}"
    yield from field("default KL", system.default_kl, margin=16)
    for kind, group in by_kind(entries):
        yield ""
        yield KINDS[kind]
        margin = min(max(len(entry.name) for entry in group) + 4, 40)
        for entry in group:
            yield from _name_and_call(entry, margin)


def _name_and_call(entry: Entry, margin: int) -> list[str]:
    text = call_text(entry)
    if len(entry.name) + 4 > margin:
        return [f"  {entry.name}", *field("", text, margin=margin)]
    return field(entry.name, text, margin=margin)


def of_option(uses: Sequence[OptionUse]) -> Iterator[str]:
    """Yields the uses of an option: the names that it takes, each with its call, or the argument that it sets."""
    for number, use in enumerate(uses):
        if number:
            yield ""
        spelled = f"{use.alias} ({use.option})" if use.alias else use.option
        if use.argument:
            names = ", ".join(dict.fromkeys(entry.name for entry in use.entries))
            source = "" if use.source == use.option else f" ({use.source})"
            yield from field(f"{use.system}:", f"{spelled} sets {use.argument}{source} of {names}", indent=0)
            continue
        yield from field(f"{use.system}:", f"{spelled} takes", indent=0)
        margin = min(max(len(entry.name) for entry in use.entries) + 4, 40)
        for entry in use.entries:
            yield from _name_and_call(entry, margin)


def call_text(entry: Entry) -> str:
    """Writes the call of an entry, with the user's arguments in angle brackets; or the reason why there is none."""
    if entry.call is None:
        return f"none: {entry.reason}"
    return repr(_with_placeholders(entry.call, entry.sources))


def _with_placeholders(call: Call, sources: Mapping[str, str]) -> Call:
    """Fills in the sources of the keyword arguments that the call leaves to the user, in all of its steps."""
    parameters = inspect.signature(getattr(kljax, call.function)).parameters.values()
    placeholders = {
        parameter.name: _Placeholder(sources[parameter.name])
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
        and parameter.name in sources
        and not {parameter.name} & {*call.arguments, *call.renamed}
    }
    return dataclasses.replace(
        call,
        arguments={**call.arguments, **placeholders},
        times=tuple(_with_placeholders(inner, sources) for inner in call.times),
        plus=tuple(_with_placeholders(inner, sources) for inner in call.plus),
        then=tuple(_with_placeholders(inner, sources) for inner in call.then),
    )


class _Placeholder(str):
    """A description in place of a value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{self}>"


def details(entry: Entry) -> Iterator[str]:
    """Yields every field of one entry."""
    system = SYSTEMS[entry.system]
    yield f"{entry.key} ({entry.kind.replace('_', ' ')}), {system.title} {entry.version or system.version}"
    yield from field("call", call_text(entry))
    for label, text in (
        ("part", entry.part),
        ("arrays", arrays_text(entry)),
        ("meaning", entry.meaning),
        ("option", entry.option),
        ("sources", "; ".join(f"{argument}: {source}" for argument, source in entry.sources.items())),
        ("clamps", entry.clamps),
        ("divisors", entry.divisors),
        ("gradient", entry.gradient),
        ("defaults", entry.defaults),
        ("note", entry.note),
        ("checked on", "; ".join(golden_text(golden) for golden in entry.goldens)),
        ("unrecorded" if entry.call else "reason", entry.reason),
    ):
        if text:
            yield from field(label, text)


def arrays_text(entry: Entry) -> str:
    """Writes the names of the arrays and arguments that the call takes."""
    if entry.call is None:
        return ""
    call = require_call(entry)
    optional = f"; optional: {', '.join(call.optional)}" if call.optional else ""
    return f"{', '.join(call.required) or 'none'}{optional}"


def golden_text(golden: Golden) -> str:
    """Writes `function(argument=value)`."""
    return f"{golden.function}({', '.join(f'{name}={value}' for name, value in golden.params.items())})"


def by_kind(entries: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """Yields each kind that has entries, in the order of `KINDS`."""
    order = list(KINDS)
    ordered = sorted(entries, key=lambda entry: order.index(entry.kind))
    for kind, group in itertools.groupby(ordered, key=lambda entry: entry.kind):
        yield kind, list(group)
