"""Searches the table by names, options and functions of the systems."""

import difflib
from collections.abc import Sequence

from kljax.systems._entry import Entry
from kljax.systems._table import ENTRIES

SHOWN = 6


def find(text: str) -> tuple[Entry, ...]:
    """Finds the entries whose name, option or function in the system contains a text.

    Case, hyphens and underscores do not matter. The functions are functions of the recorded cases, such as verl's
    `kl_penalty`, the functions that the options name, and functions of this library.

    Args:
      text: a name, `system/name`, an option, a function, or a part of one.

    Returns:
      A tuple of `Entry`: entries with exactly this name, then with this function, then names that contain
      the text; empty if there are none.

    Raises:
      TypeError: for a text that is not a string.

    Example:
      >>> import kljax
      >>> [entry.key for entry in kljax.systems.find("compute_policy_loss_vanilla")][0]
      'verl/vanilla'
      >>> [entry.key for entry in kljax.systems.find("kl_penalty")][:2]
      ['verl/kl', 'verl/k1']
    """
    if not isinstance(text, str):
        raise TypeError(f"text: got {type(text).__name__}, expected a string")
    ranked = [(rank, entry) for entry in ENTRIES if (rank := _rank(entry, normalized(text))) is not None]
    return tuple(entry for _, entry in sorted(ranked, key=lambda pair: pair[0]))


def find_by_function(text: str) -> list[Entry]:
    """Finds the entries with a function of exactly this name."""
    return [entry for entry in ENTRIES if normalized(text) in map(normalized, _functions(entry))]


def did_you_mean(text: str, known: Sequence[str], kind: str | None = None) -> str:
    """Writes the end of an error: the names that the text finds, or else names of a close function, or close names."""
    system, _, name = text.rpartition("/")
    matches = [entry for entry in find(name) if kind in (None, entry.kind)] if name else []
    matches.sort(key=lambda entry: entry.system != system)
    names = list(dict.fromkeys(entry.key for entry in matches)) or _closest(text, known)
    if not names:
        return "; search with kljax.systems.find(text)"
    more = f" ({len(names) - SHOWN} more: kljax.systems.find({name!r}))" if len(names) > SHOWN else ""
    return f"; did you mean {', '.join(map(repr, names[:SHOWN]))}?{more}"


def _closest(text: str, known: Sequence[str]) -> list[str]:
    """Lists the known names whose function, or that themselves, are spelled almost like the text."""
    functions = {function for entry in ENTRIES for function in _functions(entry)}
    close = difflib.get_close_matches(text.rpartition("/")[2], functions, n=1, cutoff=0.85)
    keys = [entry.key for function in close for entry in find_by_function(function)]
    return keys or list(dict.fromkeys(difflib.get_close_matches(text, known, n=6, cutoff=0.5)))


def normalized(text: str) -> str:
    """Removes case and separators."""
    return text.casefold().replace("-", "").replace("_", "")


def _rank(entry: Entry, text: str) -> int | None:
    names = [normalized(entry.key), normalized(entry.name), normalized(entry.name.partition("+")[0])]
    functions = [normalized(function) for function in _functions(entry)]
    if text in names:
        return 0
    if text in functions:
        return 1
    return 2 if any(text in known for known in (*names, *functions, normalized(entry.option))) else None


def _functions(entry: Entry) -> list[str]:
    """Lists the functions of an entry: recorded ones of the system, and that of this library."""
    return [*(golden.function for golden in entry.goldens), *([entry.call.function] if entry.call else [])]
