"""What one name means in each system, side by side, in words and in numbers."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kljax.systems._lookup import rows
from kljax.systems._numbers import HEADINGS, Point, numbers
from kljax.systems._row import SYSTEMS, Row
from kljax.systems._text import by_kind, field, table, written

COLUMNS = 4


class Meaning(NamedTuple):
    """Rows that mean the same, under a letter."""

    letter: str
    rows: list[Row]

    @property
    def first(self) -> Row:
        """The row that stands for all."""
        return self.rows[0]


def compare(name: str) -> Iterator[str]:
    """The lines of a comparison; nothing where no system has the name."""
    for number, (kind, group) in enumerate(by_kind(named(name))):
        if number:
            yield from ("", "")
        yield from _in_words(name, kind, group)
        yield from _in_numbers(kind, meanings(group))


def as_data(name: str) -> list[dict[str, Any]]:
    """The comparison for a program: each meaning with the names it goes by and its points."""
    return [
        {
            "kind": kind,
            "names": [row.key for row in meaning.rows],
            "also": also(meaning),
            "call": written(meaning.first),
            "points": [point._asdict() for point in numbers(meaning.first)],
        }
        for kind, group in by_kind(named(name))
        for meaning in meanings(group)
    ]


def named(name: str) -> list[Row]:
    """The rows of a name, whatever its flags and its punctuation: k3 is k3+ too, token-mean is token_mean too."""
    exact = [row for row in rows() if row.name == name]
    alike = [row for row in rows() if _spelled(row.name) == _spelled(name)]
    return exact if "+" in name.replace("++", "") and exact else alike


def _spelled(name: str) -> str:
    """Without flags, separators and case."""
    base = name.replace("++", "_plus_plus").partition("+")[0]
    return base.replace("-", "").replace("_", "").casefold()


def meanings(group: Sequence[Row]) -> list[Meaning]:
    """The rows of one kind, those with the same meaning together."""
    found: dict[Any, list[Row]] = {}
    for row in group:
        found.setdefault(_identity(row), []).append(row)
    return [Meaning(chr(ord("A") + number), members) for number, members in enumerate(found.values())]


def also(meaning: Meaning) -> list[str]:
    """The same meaning under other names."""
    if meaning.first.call is None:
        return []
    same = [row for row in rows(kind=meaning.first.kind) if _identity(row) == _identity(meaning.first)]
    return [row.key for row in same if row not in meaning.rows]


def _identity(row: Row) -> Any:
    """What two rows of the same meaning share: the call, whether a ratio to another policy enters it, what groups."""
    return (repr(row.call), "sampling_log_probs" in row.given, row.given.get("group_ids")) if row.call else row.key


def _in_words(name: str, kind: str, group: Sequence[Row]) -> Iterator[str]:
    found, systems = meanings(group), {row.system for row in group}
    count = "1 meaning" if len(found) == 1 else f"{len(found)} meanings"
    yield f"{name} ({kind.replace('_', ' ')}): {count} in {len(systems)} of {len(SYSTEMS)} systems"
    for meaning in found:
        yield ""
        yield from field(meaning.letter, ", ".join(row.key for row in meaning.rows), indent=0, margin=3)
        yield from field("call", written(meaning.first), indent=3)
        for label in ("meaning", "clamps", "divisors", "gradient", "note"):
            texts = list(dict.fromkeys(getattr(row, label) for row in meaning.rows if getattr(row, label)))
            if texts:
                yield from field(label, " | ".join(texts), indent=3)
        if others := also(meaning):
            yield from field("same as", ", ".join(others), indent=3)
    if without := [key for key in SYSTEMS if key not in systems]:
        yield ""
        yield from field("not in", ", ".join(without), indent=0, margin=8)


def _in_numbers(kind: str, found: Sequence[Meaning]) -> Iterator[str]:
    columns = [(meaning.letter, points) for meaning in found if (points := numbers(meaning.first))]
    if not columns:
        return
    yield ""
    yield from field("", HEADINGS[kind], margin=2)
    for start in range(0, len(columns), COLUMNS):
        chunk = columns[start : start + COLUMNS]
        lines = [[points[0].at, *map(_cell, points)] for points in zip(*(points for _, points in chunk), strict=True)]
        yield ""
        yield from table(["", *(letter for letter, _ in chunk)], lines)


def _cell(point: Point) -> str:
    return f"{point.value:.4g}" if point.gradient is None else f"{point.value:.4g} / {point.gradient:.4g}"
