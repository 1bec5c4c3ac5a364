"""Looks a name up: its entry, its call, the arguments of its call, and the names that a text may have meant."""

import copy
import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from kljax._checks import check_choice
from kljax.systems._call import Call
from kljax.systems._entry import KINDS, Entry
from kljax.systems._table import ENTRIES, SYSTEMS

# Kinds whose arguments are those of one function.
FUNCTIONS = {"kl": "estimate_kl", "reduction": "token_weights"}
# Arguments of this library that take names, by the kind of the names that the systems have for them.
HINTED = {"mode": "reduction", "estimator": "kl"}
# Names that an error lists.
SHOWN = 6
SHOWN_IN_HINTS = 3
EXACT = (
    "the exact KL over the vocabulary comes from hidden states: kljax.token_kl, kljax.kl_from_hidden, or the kl of "
    "kljax.token_log_probs(..., reference=(ref_hidden, ref_head))"
)


def entries(*, system: str | None = None, kind: str | None = None, name: str | None = None) -> tuple[Entry, ...]:
    """Selects entries of the table by system, kind and name.

    Args:
      system: "trinity", "skyrl", "slime", "art", "verl", "openrlhf", "trl" or "prime-rl"; None for every system.
      kind: "kl", "reduction", "advantage", "policy_loss", "value_loss", "correction", "controller", "placement",
        "distillation" or "statistic"; None for every kind.
      name: a name as the systems spell it; None for every name. A name without an entry gives an empty tuple.

    Returns:
      A tuple of `Entry`, ordered by kind and then by system.

    Raises:
      ValueError: for an unknown system or kind.

    Example:
      >>> import kljax
      >>> for entry in kljax.systems.entries(kind="kl", name="k3"):
      ...     print(entry.system, entry.clamps)
      trinity none
      skyrl x to [-20, 20], then the value to [-10, 10]
      slime none
      verl x to [-20, 20], then the value to [-10, 10]
      openrlhf x from below at -10 (since 0.11), the value to [-10, 10]
      trl none
    """
    if system is not None:
        check_choice("system", system, SYSTEMS)
    if kind is not None:
        check_choice("kind", kind, KINDS)
    criteria = {"system": system, "kind": kind, "name": name}
    criteria = {field: value for field, value in criteria.items() if value is not None}
    return tuple(entry for entry in ENTRIES if all(getattr(entry, field) == value for field, value in criteria.items()))


def get(name: str, *, kind: str | None = None) -> Call:
    """Returns the call of any name of the table, whatever its kind; the call runs on arrays by name.

    Args:
      name: `system/name`, such as "verl/low_var_kl". Flags follow a plus, as in "k3+use_unbiased_kl".
      kind: the kind of the name, as in `entries`; needed only where the system uses the name in several kinds.

    Returns:
      A `Call`: `get(name)(arrays, **arguments)`. Its `required` and `optional` list the names of the arrays, and the
      `sources` of the entry say where the system takes them from.

    Gradient:
      That of the function called; the `gradient` of the entry describes it.

    Raises:
      ValueError: for an unknown name, with the names that have it, a part of it, or a function of that name in the
        system; for a name of several kinds without `kind`; for a name without a call, with the reason.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> low_var_kl = kljax.systems.get("verl/low_var_kl")
      >>> arrays = {"log_probs": jnp.array([-1.0]), "ref_log_probs": jnp.array([-2.0])}
      >>> print(low_var_kl(arrays))
      [0.36787945]
      >>> kljax.systems.get("trl/grpo", kind="reduction")
      kljax.token_weights(mode='seq_mean_token_mean', empty_rows='count')
    """
    return require_call(get_entry(name, kind))


def arguments(name: str, *, kind: str | None = None) -> dict[str, Any]:
    """Returns the keyword arguments of a name that stands for one function, without the arrays.

    These belong to `estimate_kl` for a KL estimator, of `token_weights` for a reduction, else of the function that
    `get(name)` shows. Lengths, group ids and schedules are the user's: the `sources` of the entry say where the system
    takes them from. So are the `sampling_log_probs` of an estimator whose name implies an importance correction.

    Args:
      name: `system/name`, as in `get`.
      kind: the kind of the name, as in `get`.

    Returns:
      A new dictionary: `kljax.estimate_kl(log_probs, ref_log_probs, mask, **arguments(name))`.

    Raises:
      ValueError: as `get`; for a name that the arguments of one function do not express, with the call that does.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> kljax.systems.arguments("verl/low_var_kl+")
      {'estimator': 'low_var_kl', 'gradient': 'k2'}
      >>> lp, ref, mask = jnp.array([-1.0]), jnp.array([-2.0]), jnp.array([True])
      >>> print(kljax.estimate_kl(lp, ref, mask, **kljax.systems.arguments("skyrl/k2")))
      [0.5]
      >>> kljax.systems.arguments("trinity/seq-mean-token-mean")
      {'mode': 'seq_mean_token_mean', 'empty_rows': 'count'}
    """
    entry = get_entry(name, kind)
    call = require_call(entry)
    function = FUNCTIONS.get(entry.kind, call.function)
    if call.function != function or call.field or call.scale != 1 or call.times or call.then or call.plus:
        raise ValueError(f"{entry.key} is {call!r}, which arguments of {function} do not express")
    return copy.deepcopy(dict(call.arguments))


def get_entry(name: str, kind: str | None = None) -> Entry:
    """Returns the entry of `system/name`, of one kind or of any.

    Raises:
      ValueError: if no kind has the name, or several have.
    """
    named = [entry for entry in entries(kind=kind) if entry.key == name]
    if len(named) > 1:
        kinds = ", ".join(entry.kind for entry in named)
        raise ValueError(f"kind: got None, expected one of {kinds}, which all have the name {name!r}; pass kind")
    if not named:
        system, slash, rest = name.partition("/")
        if kind is not None and slash:
            known = [entry.name for entry in entries(system=system, kind=kind)]
            check_choice(f"{system} {kind.replace('_', ' ')}", rest, known)
        known = [entry.key for entry in entries(kind=kind)]
        raise ValueError(f"name: got {name!r}, expected system/name{did_you_mean(name, known, kind)}")
    return named[0]


def require_call(entry: Entry) -> Call:
    """Returns the call of an entry; its arrays have the names of the entry's sources.

    Raises:
      ValueError: if the entry has no call, with the reason.
    """
    if entry.call is None:
        raise ValueError(f"{entry.key} has no call here: {entry.reason}")
    # An estimator whose name implies an importance ratio computes another number without it.
    corrected = entry.kind == "kl" and "sampling_log_probs" in entry.sources
    needs = ("sampling_log_probs",) if corrected else ()
    if entry.call.arguments.get("loss") == "exo_pair":
        needs = ("label_smoothing",)
    return dataclasses.replace(entry.call, needs=needs, takes=tuple(entry.sources))


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
    ranked = [(rank, entry) for entry in ENTRIES if (rank := _rank(entry, _normalized(text))) is not None]
    return tuple(entry for _, entry in sorted(ranked, key=lambda pair: pair[0]))


def find_by_function(text: str) -> list[Entry]:
    """Finds the entries with a function of exactly this name."""
    return [entry for entry in ENTRIES if _normalized(text) in map(_normalized, _functions(entry))]


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


def _normalized(text: str) -> str:
    """Removes case and separators."""
    return text.casefold().replace("-", "").replace("_", "")


def _rank(entry: Entry, text: str) -> int | None:
    names = [_normalized(entry.key), _normalized(entry.name), _normalized(entry.name.partition("+")[0])]
    functions = [_normalized(function) for function in _functions(entry)]
    if text in names:
        return 0
    if text in functions:
        return 1
    return 2 if any(text in known for known in (*names, *functions, _normalized(entry.option))) else None


def _functions(entry: Entry) -> list[str]:
    """Lists the functions of an entry: recorded ones of the system, and that of this library."""
    return [*(golden.function for golden in entry.goldens), *([entry.call.function] if entry.call else [])]


def hint_for_choice(argument: str, value: object) -> str:
    """Writes what a reduction or estimator is here that the systems have by this name; nothing for other arguments."""
    if argument == "estimator" and value in ("exact", "full", "full_kl", "exact_kl"):
        return f"; {EXACT}"
    kind = HINTED.get(argument)
    meanings: dict[str, str] = {}
    for entry in ENTRIES:
        if entry.kind == kind and entry.name == value and entry.call and argument in entry.call.arguments:
            meanings.setdefault(entry.call.arguments[argument], entry.key)
    listed = [f"{key} is {argument}={meaning!r}" for meaning, key in meanings.items()]
    return f"; {', '.join(listed[:SHOWN_IN_HINTS])}: see kljax.systems.get(name)" if listed else ""


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
        listed = ", ".join(list(dict.fromkeys(keys))[:SHOWN_IN_HINTS])
        hints.append(f"other systems have it as {listed}: search with kljax.systems.find({stem!r})")
    return f"; {'; '.join(hints)}" if hints else ""
