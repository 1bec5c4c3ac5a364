"""Error messages: one line that names the field, the value and the allowed values."""

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from pydantic import ValidationError

from train.config.address import without_password
from train.config.fields import Known, known_fields, variant_fields
from train.config.usual_names import USUAL_VALUES, usual_field

Location: TypeAlias = tuple[str | int, ...]


class _Short(reprlib.Repr):
    """Shortens values; an address loses its password before it loses its end."""

    def repr_str(self, value: str, level: int) -> str:
        """Shortens a text."""
        return super().repr_str(without_password(value), level)


_SHORT = _Short()
_SHORT.maxlevel = 3
_SHORT.maxstring = 80
_SHORT.maxother = 80
NEAR = 0.75
"""Names with more letters in common than this share are near."""
PART = NEAR
COMPOUND = NEAR / 2
"""The likeness of a name that has some of the other's words; and of one that has more."""
MOST_HINTS = 4
_WORDS = {"None": "null", "True": "true", "False": "false"}


def show(value: Any) -> str:
    """A value the way it is written in YAML, shortened."""
    text = _SHORT.repr(value)
    return _WORDS.get(text, text)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?`, or nothing where no candidate is near, or too many are.

    Example:
        >>> did_you_mean("cosine_with_restarts", ["constant", "linear", "cosine"])
        "; did you mean 'cosine'?"
        >>> did_you_mean("grpo", ["gvpo", "ppo"])
        ''
    """
    likeness = {candidate: _likeness(word, candidate) for candidate in candidates}
    return _hint([candidate for candidate in likeness if likeness[candidate] == max(likeness.values()) > 0])


def _hint(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(map(repr, names))}?" if 0 < len(names) <= MOST_HINTS else ""


def _likeness(word: str, candidate: str) -> float:
    """Returns how near two names are: above `NEAR` by letters, `PART` or `COMPOUND` by words, or 0.

    Short names are often acronyms, of which one letter makes another.
    """
    first, second = (re.sub(r"[^a-z0-9]+", "_", name.casefold()).strip("_") for name in (word, candidate))
    words = set(first.split("_"))
    others = set(second.split("_"))
    if (words < others or others < words) and max(map(len, words & others)) > 2:
        return PART if words < others else COMPOUND
    if re.sub(r"\d", "", first) == re.sub(r"\d", "", second):
        numbers = [int(re.sub(r"\D", "", name) or 0) for name in (first, second)]
        return 1 - 0.1 * (1 - 1 / (1 + abs(numbers[0] - numbers[1])))
    ratio = difflib.SequenceMatcher(None, first.replace("_", ""), second.replace("_", "")).ratio()
    return ratio if ratio > NEAR else 0


def unknown_field(path: str) -> str:
    """Returns the line for a path that the schema does not have."""
    known = known_fields()
    parent = path.rpartition(".")[0]
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    if parent and not known[parent].section:
        return f"{path}: unknown field, {parent} is {known[parent].expected}; did you mean {parent!r}?"
    names = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    usual = usual_field(path)
    hint = _hint([usual] if usual else _near_fields(path))
    # The names of all sections are worth a line only if nothing else helps.
    return f"{path}: unknown field" + (hint if hint and not parent else f", expected one of {', '.join(names)}{hint}")


def _near_fields(path: str) -> list[str]:
    """Lists the fields nearest to a path: by letters; else with its words in its section, or of its name elsewhere."""
    *sections, name = path.split(".")
    spelled: dict[tuple[bool, float], list[str]] = {}
    with_words: dict[float, list[str]] = {}
    elsewhere = []
    for field in known_fields():
        *others, last = field.split(".")
        likeness = _likeness(name, last)
        same = len(sections) == len(others) and all(map(_is_spelled_alike, sections, others))
        if not same and sections and sections[:1] != others[:1]:
            elsewhere += [field] if likeness == 1 else []
        elif likeness > NEAR:
            spelled.setdefault((same, likeness), []).append(field)
        elif likeness and (sections or likeness == PART):
            with_words.setdefault(likeness, []).append(field)
    if spelled:
        return spelled[max(spelled)]
    # Of fields of its name, the one outside of all sections is the usual one.
    elsewhere = [name] if name in elsewhere else elsewhere
    return [*(elsewhere if len(elsewhere) <= 2 else []), *(with_words[max(with_words)] if with_words else [])]


def _is_spelled_alike(first: str, second: str) -> bool:
    return _likeness(first, second) > NEAR


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
    hint = _value_hint(known, value) if isinstance(value, str) else ""
    return f"{path}: got {show(value)}{reason}, expected {expected}{hint}"


def _value_hint(known: Known, value: str) -> str:
    """Suggests the choice that a value means in other trainers, or a near one."""
    usual = USUAL_VALUES.get(known.path, {})
    spelled = value.casefold().replace("-", "_")
    if spelled in usual:
        return _hint([choice for choice in (usual[spelled],) if choice in known.choices])
    return did_you_mean(value, known.choices)


def _wrong_tag(path: str, item: dict[str, Any], tag: Known) -> str:
    name = tag.path.rpartition(".")[2]
    if item["type"] == "union_tag_not_found":
        return f"{path}.{name}: missing, expected {tag.expected}"
    return _wrong_value(f"{path}.{name}", item["input"][name], tag, item)


def _wrong_variant(path: str, parent: Known, variant: str) -> str:
    field = path.rpartition(".")[2]
    section = path.rpartition(".")[0]
    tag = f"{section}.{parent.tag}"
    having = known_fields()[f"{parent.path}.{field}"].variants
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
