"""Ends of error messages: what a name of another system is in this library."""

import difflib
from collections.abc import Iterable

from kljax.systems._search import find, find_by_function
from kljax.systems._table import ENTRIES

KINDS = {"mode": "reduction", "estimator": "kl"}
SHOWN = 3
EXACT = (
    "the exact KL over the vocabulary comes from hidden states: kljax.token_kl, kljax.kl_from_hidden, or the kl of "
    "kljax.token_log_probs(..., reference=(ref_hidden, ref_head))"
)


def hint_for_choice(argument: str, value: object) -> str:
    """Writes what a reduction or estimator is here that the systems have by this name; nothing for other arguments."""
    if argument == "estimator" and value in ("exact", "full", "full_kl", "exact_kl"):
        return f"; {EXACT}"
    kind = KINDS.get(argument)
    meanings: dict[str, str] = {}
    for entry in ENTRIES:
        if entry.kind == kind and entry.name == value and entry.call and argument in entry.call.arguments:
            meanings.setdefault(entry.call.arguments[argument], entry.key)
    listed = [f"{key} is {argument}={meaning!r}" for meaning, key in meanings.items()]
    return f"; {', '.join(listed[:SHOWN])}: see kljax.systems.get(name)" if listed else ""


def hint_for_attribute(name: str, public: Iterable[str]) -> str:
    """Writes which names of the systems have this function or name, and which public name is spelled almost like it."""
    if name in ("exact_kl", "full_kl", "kl_exact", "kl_full"):
        return f"; did you mean kljax.token_kl? {EXACT}"
    stem = name.removesuffix("_loss").removesuffix("_advantages")
    keys = [entry.key for entry in [*find_by_function(name), *(find(stem) if stem else ())]]
    # What a system calls exactly so is no misspelling.
    known = any(key.partition("/")[2].partition("+")[0] == stem for key in keys)
    close = [] if known else difflib.get_close_matches(name, list(public), n=1, cutoff=0.6)
    hints = [f"did you mean kljax.{close[0]}?"] if close else []
    if keys:
        listed = ", ".join(list(dict.fromkeys(keys))[:SHOWN])
        hints.append(f"other systems have it as {listed}: search with kljax.systems.find({stem!r})")
    return f"; {'; '.join(hints)}" if hints else ""
