"""A problem that a check finds, and helpers that make it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from train.config.download import download_hint
from train.config.storage import is_address
from train.config.types import Section


class Problem(NamedTuple):
    """A line, and the fields it rests on."""

    fields: tuple[str, ...]
    text: str


def problem(text: str, *fields: str) -> Problem:
    """A line about the first field."""
    return Problem(fields, f"{fields[0]}: {text}")


def changed(section: Section, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, value and default of the fields that are not at their default."""
    for name in names:
        value = getattr(section, name)
        default = type(section).model_fields[name].get_default()
        if value != default:
            yield name, value, default


def missing_path(name: str, path: str) -> Iterator[Problem]:
    if not is_address(path) and not Path(path).exists():  # a bucket is looked into when it is opened
        hint = download_hint(Path(path))
        yield problem(f"got {path!r}, expected a saved checkpoint, but there is no such path{hint}", name)
