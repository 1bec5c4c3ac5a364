"""Plain text within 100 columns."""

import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import kljax
from kljax.systems._row import KINDS, SYSTEMS, Golden, Row

WIDTH = 100


def field(label: str, text: str, indent: int = 2, margin: int = 13) -> list[str]:
    """A label, and its text wrapped beside it."""
    start = f"{' ' * indent}{label}".ljust(margin)
    lines = textwrap.wrap(text, WIDTH - margin, break_on_hyphens=False) or [""]
    return [f"{start if number == 0 else ' ' * margin}{line}".rstrip() for number, line in enumerate(lines)]


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, the first to the left and the others to the right."""
    cells = [list(header), *map(list, lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


def overview(rows: Sequence[Row]) -> Iterator[str]:
    """Every system with its names by kind."""
    counted = f"{len(rows)} names of {len(SYSTEMS)} systems"
    yield f"{counted}; `python -m kljax systems NAME` explains one, a system, or system/name."
    for key, system in SYSTEMS.items():
        yield ""
        yield f"{key}: {system.title} {system.version}"
        yield from field("default KL", system.default_kl, margin=16)
        for kind, group in by_kind([row for row in rows if row.system == key]):
            yield from field(kind, ", ".join(row.name for row in group), margin=16)


def of_system(rows: Sequence[Row]) -> Iterator[str]:
    """The names of one system, each with its call."""
    system = SYSTEMS[rows[0].system]
    yield f"{system.key}: {system.title} {system.version}"
    yield from field("default KL", system.default_kl, margin=16)
    for kind, group in by_kind(rows):
        yield ""
        yield KINDS[kind]
        margin = min(max(len(row.name) for row in group) + 4, 40)
        for row in group:
            yield from _named(row, margin)


def _named(row: Row, margin: int) -> list[str]:
    text = written(row)
    if len(row.name) + 4 > margin:
        return [f"  {row.name}", *field("", text, margin=margin)]
    return field(row.name, text, margin=margin)


def written(row: Row) -> str:
    """The call of a row, with what the user has to give it in angle brackets; or that there is none, and why."""
    if row.call is None:
        return f"none: {row.reason}"
    parameters = inspect.signature(getattr(kljax, row.call.function)).parameters
    missing = [name for name in row.given if name not in row.call.arguments]
    keywords = [
        name for name in missing if name in parameters and parameters[name].kind is parameters[name].KEYWORD_ONLY
    ]
    more = {name: _Given(row.given[name]) for name in keywords}
    return repr(dataclasses.replace(row.call, arguments={**row.call.arguments, **more}))


class _Given(str):
    """Text that stands for a value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{self}>"


def details(row: Row) -> Iterator[str]:
    """Everything about one name."""
    system = SYSTEMS[row.system]
    yield f"{row.key} ({row.kind.replace('_', ' ')}), {system.title} {row.version or system.version}"
    yield from field("call", written(row))
    for label, text in (
        ("meaning", row.meaning),
        ("option", row.option),
        ("given", "; ".join(f"{argument}: {source}" for argument, source in row.given.items())),
        ("clamps", row.clamps),
        ("divisors", row.divisors),
        ("gradient", row.gradient),
        ("defaults", row.defaults),
        ("note", row.note),
        ("checked on", "; ".join(recorded(golden) for golden in row.goldens)),
        ("unrecorded" if row.call else "reason", row.reason),
    ):
        if text:
            yield from field(label, text)


def recorded(golden: Golden) -> str:
    """`function(argument=value)`."""
    return f"{golden.function}({', '.join(f'{name}={value}' for name, value in golden.params.items())})"


def by_kind(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each kind that has any, in the order of the kinds."""
    order = list(KINDS)
    ordered = sorted(rows, key=lambda row: order.index(row.kind))
    for kind, group in itertools.groupby(ordered, key=lambda row: row.kind):
        yield kind, list(group)
