"""Error messages: one line that names the field, the value and the allowed values."""

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any, TypeAlias

from pydantic import ValidationError

from train.config.address import without_password
from train.config.fields import Known, known_fields, variant_fields
from train.config.usual_names import USUAL_NAMES

Location: TypeAlias = tuple[str | int, ...]


class _Short(reprlib.Repr):
    """Shortens values; an address loses its password before it loses its end."""

    def repr_str(self, value: str, level: int) -> str:
        """Shortens a text."""
        return super().repr_str(without_password(value), level)


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 80, 80
_WORDS = {"None": "null", "True": "true", "False": "false"}


def show(value: Any) -> str:
    """A value the way it is written in YAML, shortened."""
    text = _SHORT.repr(value)
    return _WORDS.get(text, text)


def did_you_mean(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?`, or nothing where no candidate is close."""
    by_case = {candidate.casefold(): candidate for candidate in candidates}
    close = difflib.get_close_matches(word.casefold(), by_case, n=1, cutoff=cutoff)
    return f"; did you mean '{by_case[close[0]]}'?" if close else ""


def unknown_field(path: str) -> str:
    """The line for a path that the schema does not have."""
    known = known_fields()
    parent = path.rpartition(".")[0]
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    names = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    allowed = f"expected one of {', '.join(names)}" if names else f"{parent} is {known[parent].expected}"
    if not names and known[parent].expected.startswith("a mapping of"):
        entry = path.removeprefix(f"{parent}.")
        return f"{path}: {parent} is {known[parent].expected}; write {parent}={{{entry}: ...}}"
    hint = _usual_name(path) or did_you_mean(path, known) or _by_last_name(path)
    return f"{path}: unknown field, {allowed}{hint}"


def field_problems(error: ValidationError) -> list[tuple[Location, str]]:
    """Lists pydantic's errors: the location of each, which cannot be trusted, and the line to show."""
    return [_problem(dict(item)) for item in error.errors(include_url=False)]


def dotted(location: Iterable[str | int]) -> str:
    """`("lora", "targets", 1)` as `lora.targets[1]`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _problem(item: dict[str, Any]) -> tuple[Location, str]:
    location, variant = _without_variants(item["loc"])
    path = dotted(location)
    names = tuple(part for part in location if isinstance(part, str))
    joined = dotted(names)
    known = variant_fields().get((joined, variant)) or known_fields().get(joined)
    if item["type"] == "invalid_key":
        return location, f"{path}: got the key {show(item['input'])}, expected text"
    if known is None:
        return location, unknown_field(joined).replace(joined, path, 1)
    if item["type"] == "extra_forbidden":
        return location, _wrong_variant(path, known_fields()[_field_path(location[:-1])], variant)
    if item["type"] == "missing":
        return location[:-1] or location, f"{path}: missing, expected {known.expected}"
    if known.tag and item["type"].startswith("union_tag"):
        return location, _wrong_tag(path, item, known_fields()[f"{joined}.{known.tag}"])
    return location if known.list_path else names, _wrong_value(path, item["input"], known, item)


def _wrong_value(path: str, value: Any, known: Known, item: dict[str, Any]) -> str:
    reason = f" ({item['ctx']['error']})" if item["type"] == "value_error" else ""
    single = item["type"] == "literal_error"  # one entry, possibly of a list
    expected = f"one of {', '.join(known.choices)}" if single and len(known.choices) > 1 else known.expected
    if item["type"] == "finite_number":
        expected = expected.replace("a number", "a finite number")
    if item["type"] == "string_type" and isinstance(value, bool | int | float):
        expected += f" (quote it: {show(str(value))})"
    if item["type"] == "string_type" and isinstance(value, dict):
        expected += " (quote text with a colon at its end or before a blank)"
    hint = did_you_mean(value, known.choices, cutoff=0.5) if isinstance(value, str) else ""
    return f"{path}: got {show(value)}{reason}, expected {expected}{hint}"


def _wrong_tag(path: str, item: dict[str, Any], tag: Known) -> str:
    name = tag.path.rpartition(".")[2]
    if item["type"] == "union_tag_not_found":
        return f"{path}.{name}: missing, expected {tag.expected}"
    return _wrong_value(f"{path}.{name}", item["input"][name], tag, item)


def _wrong_variant(path: str, parent: Known, variant: str) -> str:
    field, section = path.rpartition(".")[2], path.rpartition(".")[0]
    tag, having = f"{section}.{parent.tag}", known_fields()[f"{parent.path}.{field}"].variants
    line = f"{path}: not a field when {tag} is {variant}; change {tag} ({', '.join(having)}), or "
    if parent.entries:
        return f"{line}remove the field"
    return f"{line}replace the section with {parent.path}={{{parent.tag}: {variant}}}"


def _without_variants(location: Location) -> tuple[Location, str]:
    """Removes the chosen variant of a union, which pydantic puts into the location, from the path.

    The variant of an entry of a list comes after its number.
    """
    cleaned: list[str | int] = []
    variant = ""
    parts = list(location)
    while parts:
        cleaned.append(parts.pop(0))
        known = known_fields().get(_field_path(cleaned))
        if known and known.tag and parts and not isinstance(parts[0], int):
            variant = str(parts.pop(0))
    return tuple(cleaned), variant


def _field_path(location: Iterable[str | int]) -> str:
    """Returns the path in the schema: `("correction", 1, "upper")` as `correction.upper`."""
    return dotted(part for part in location if isinstance(part, str))


def _usual_name(path: str) -> str:
    """Returns the hint for a name that other trainers use for a field."""
    field = USUAL_NAMES.get(path.casefold().replace("-", "_"))
    return f"; did you mean '{field}'?" if field else ""


def _by_last_name(path: str) -> str:
    """Suggests the right section for a name, such as `learning_rate` at the top level."""
    name = path.rpartition(".")[2]
    matches = [known for known in known_fields() if known.rpartition(".")[2] == name]
    return f"; did you mean {' or '.join(repr(item) for item in matches[:3])}?" if matches else ""
