"""Compares the meanings of one name across the systems, in words and in numbers."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kljax.systems._entry import Entry
from kljax.systems._lookup import entries
from kljax.systems._table import SYSTEMS
from kljax.tools.systems.numbers import HEADINGS, Point, numbers
from kljax.tools.systems.text import by_kind, call_text, field, table

COLUMNS = 4


class Meaning(NamedTuple):
    """Entries of the same meaning, under one letter."""

    letter: str
    entries: list[Entry]

    @property
    def first(self) -> Entry:
        """The entry that stands for all of them."""
        return self.entries[0]


def compare(name: str) -> Iterator[str]:
    """Yields the lines of a comparison; none if no system has the name."""
    for number, (kind, group) in enumerate(by_kind(find_by_name(name))):
        if number:
            yield from ("", "")
        yield from _in_words(name, kind, group)
        yield from _in_numbers(kind, meanings(group))


def comparison_as_json(name: str) -> list[dict[str, Any]]:
    """Returns the comparison as plain data: each meaning with its names, its call and its points."""
    return [
        {
            "kind": kind,
            "names": [entry.key for entry in meaning.entries],
            "also": other_names(meaning),
            "call": call_text(meaning.first),
            "points": [point._asdict() for point in numbers(meaning.first)],
        }
        for kind, group in by_kind(find_by_name(name))
        for meaning in meanings(group)
    ]


def find_by_name(name: str) -> list[Entry]:
    """Finds a name in every system, ignoring flags and punctuation.

    "k3" finds "k3+use_unbiased_kl" too, and "token-mean" finds "token_mean". A name with a flag matches exactly.
    """
    if "+" in name.replace("++", ""):
        return [entry for entry in entries() if entry.name == name]
    return [entry for entry in entries() if _normalized(entry.name) == _normalized(name)]


def _normalized(name: str) -> str:
    """Removes flags, separators and case."""
    base = name.replace("++", "_plus_plus").partition("+")[0]
    return base.replace("-", "").replace("_", "").casefold()


def meanings(group: Sequence[Entry]) -> list[Meaning]:
    """Groups entries of one kind by meaning."""
    by_meaning: dict[Any, list[Entry]] = {}
    for entry in group:
        by_meaning.setdefault(_identity(entry), []).append(entry)
    return [Meaning(chr(ord("A") + number), members) for number, members in enumerate(by_meaning.values())]


def other_names(meaning: Meaning) -> list[str]:
    """Lists the names outside the group that have the same meaning."""
    if meaning.first.call is None:
        return []
    same = [entry for entry in entries(kind=meaning.first.kind) if _identity(entry) == _identity(meaning.first)]
    return [entry.key for entry in same if entry not in meaning.entries]


def _identity(entry: Entry) -> Any:
    """Returns a value that is equal for entries of the same meaning: call, importance ratio and grouping."""
    if entry.call is None:
        return entry.key
    return repr(entry.call), "sampling_log_probs" in entry.sources, entry.sources.get("group_ids")


def _in_words(name: str, kind: str, group: Sequence[Entry]) -> Iterator[str]:
    distinct = meanings(group)
    systems = {entry.system for entry in group}
    count = "1 meaning" if len(distinct) == 1 else f"{len(distinct)} meanings"
    yield f"{name} ({kind.replace('_', ' ')}): {count} in {len(systems)} of {len(SYSTEMS)} systems"
    for meaning in distinct:
        yield ""
        yield from field(meaning.letter, ", ".join(entry.key for entry in meaning.entries), indent=0, margin=3)
        yield from field("call", call_text(meaning.first), indent=3)
        for label in ("meaning", "clamps", "divisors", "gradient", "note"):
            texts = list(dict.fromkeys(getattr(entry, label) for entry in meaning.entries if getattr(entry, label)))
            if texts:
                yield from field(label, " | ".join(texts), indent=3)
        if others := other_names(meaning):
            yield from field("same as", ", ".join(others), indent=3)
    if without := [key for key in SYSTEMS if key not in systems]:
        yield ""
        yield from field("not in", ", ".join(without), indent=0, margin=8)


def _in_numbers(kind: str, distinct: Sequence[Meaning]) -> Iterator[str]:
    columns = [(meaning.letter, points) for meaning in distinct if (points := numbers(meaning.first))]
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
