"""Looks a name up: its entry, its call, or the arguments of its call."""

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kljax._checks import check_choice
from kljax.systems._call import Call
from kljax.systems._entry import KINDS, Entry
from kljax.systems._search import did_you_mean
from kljax.systems._table import ENTRIES, SYSTEMS


def entries(*, system: str | None = None, kind: str | None = None, name: str | None = None) -> tuple[Entry, ...]:
    """Selects entries of the table by system, kind and name.

    Args:
      system: "trinity", "skyrl", "slime", "art", "verl", "openrlhf", "trl" or "prime-rl"; None for every system.
      kind: "kl", "reduction", "advantage", "policy_loss", "value_loss", "correction", "controller", "placement",
        "distillation" or "statistic"; None for every kind.
      name: a name as the systems spell it; None for every name. A name without an entry gives an empty tuple.

    Returns:
      A tuple of `Entry`, ordered by kind and then by system.

    Gradient:
      None; it is a table.

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


def kl(system: str, name: str) -> dict[str, Any]:
    """Returns the arguments of `estimate_kl` that compute a system's KL estimator.

    Some names imply an importance correction (the entry has `max_ratio`, or `sampling_log_probs` in its `sources`):
    pass the log-probs of the policy that drew the tokens as `sampling_log_probs` for these.

    Args:
      system: key of the system, such as "verl".
      name: the name as the system spells it, such as "low_var_kl".

    Returns:
      A new dictionary: `kljax.estimate_kl(log_probs, ref_log_probs, mask, **kl(system, name))`.

    Gradient:
      None; the `gradient` of the entry describes that of the estimate.

    Raises:
      ValueError: for an unknown system or name, with the known names; for a name that `estimate_kl` alone does not
        express, with the call that does.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> kljax.systems.kl("verl", "low_var_kl+")
      {'estimator': 'low_var_kl', 'gradient': 'k2'}
      >>> lp, ref, mask = jnp.array([-1.0]), jnp.array([-2.0]), jnp.array([True])
      >>> print(kljax.estimate_kl(lp, ref, mask, **kljax.systems.kl("skyrl", "k2")))
      [0.5]
    """
    return _arguments(find("kl", system, name), "estimate_kl")


def reduction(system: str, name: str) -> dict[str, Any]:
    """Returns the arguments of `token_weights` that compute a system's reduction.

    Lengths, group ids and numbers of groups are the user's: the `sources` of the entry say where the system takes them
    from.

    Args:
      system: key of the system, such as "trinity".
      name: the name as the system spells it, such as "seq-mean-token-mean".

    Returns:
      A new dictionary: `kljax.token_weights(mask, **reduction(system, name))`.

    Gradient:
      None; weights are treated as constants.

    Raises:
      ValueError: for an unknown system or name, with the known names.

    Example:
      >>> import kljax
      >>> kljax.systems.reduction("trinity", "seq-mean-token-mean")
      {'mode': 'seq_mean_token_mean', 'empty_rows': 'count'}
      >>> kljax.systems.reduction("verl", "seq-mean-token-mean")
      {'mode': 'seq_mean_token_mean', 'empty_rows': 'drop'}
    """
    return _arguments(find("reduction", system, name), "token_weights")


def advantage(system: str, name: str) -> Call:
    """Returns the call that computes a system's advantage estimator, with its steps after the estimator.

    Args:
      system: key of the system, such as "verl".
      name: the name as the system spells it, such as "grpo".

    Returns:
      A `Call`. The arrays of the function, and the arguments in the `sources` of the entry, are the user's.

    Gradient:
      None; advantages are treated as constants.

    Raises:
      ValueError: for an unknown system or name, with the known names; for a name without a call, with the reason.

    Example:
      >>> import kljax
      >>> kljax.systems.advantage("verl", "grpo").function
      'grpo_advantages'
    """
    return require_call(find("advantage", system, name))


def policy_loss(system: str, name: str) -> Call:
    """Returns the call that computes a system's policy loss, with the system's defaults.

    Args:
      system: key of the system, such as "verl".
      name: the name as the system spells it, such as "vanilla".

    Returns:
      A `Call`. The `sources` of the entry map its arguments to the options of the system.

    Gradient:
      None; the `gradient` of the entry describes that of the loss.

    Raises:
      ValueError: for an unknown system or name, with the known names; for a name without a call, with the reason.

    Example:
      >>> import kljax
      >>> kljax.systems.policy_loss("verl", "vanilla")
      kljax.ppo_clip_loss(clip_low=0.2, clip_high=0.2, dual_clip=3.0, log_ratio_clip=20.0)
    """
    return require_call(find("policy_loss", system, name))


def correction(system: str, name: str) -> Call:
    """Returns the call of a system's correction for the mismatch of trainer and sampler: weights, or a mask.

    Args:
      system: key of the system, such as "slime".
      name: the name as the system spells it, such as "vanilla_tis".

    Returns:
      A `Call`. The `sources` of the entry map its arguments to the options of the system.

    Gradient:
      None; weights and masks of recorded policies are treated as constants.

    Raises:
      ValueError: for an unknown system or name, with the known names; for a name without a call, with the reason.

    Example:
      >>> import kljax
      >>> kljax.systems.correction("verl", "rollout_is=token").function
      'importance_weights'
    """
    return require_call(find("correction", system, name))


def controller(system: str, name: str) -> Call:
    """Returns the call that controls a system's KL coefficient, or its reference.

    Args:
      system: key of the system, such as "verl".
      name: the name as the system spells it, such as "adaptive".

    Returns:
      A `Call` with the system's defaults.

    Gradient:
      None; coefficients are treated as constants.

    Raises:
      ValueError: for an unknown system or name, with the known names; for a name without a call, with the reason.

    Example:
      >>> import kljax
      >>> kljax.systems.controller("verl", "adaptive")
      kljax.adaptive_kl(coef=0.001, target=0.1, horizon=10000)
    """
    return require_call(find("controller", system, name))


def find(kind: str, system: str, name: str) -> Entry:
    """Returns the entry of a name.

    Raises:
      ValueError: for an unknown system or name, with the known ones.
    """
    check_choice("system", system, SYSTEMS)
    known = [entry.name for entry in entries(system=system, kind=kind)]
    check_choice(f"{system} {kind.replace('_', ' ')}", name, known)
    return _index()[kind, system, name]


def get_entry(name: str, kind: str | None = None) -> Entry:
    """Returns the entry of `system/name`.

    Args:
      name: such as `verl/adaptive`.
      kind: one of `KINDS`; None searches all.

    Raises:
      ValueError: if no kind has the name, or several have.
    """
    named = [entry for entry in entries(kind=kind) if entry.key == name]
    if len(named) > 1:
        kinds = ", ".join(entry.kind for entry in named)
        raise ValueError(f"kind: got None, expected one of {kinds}, which all have the name {name!r}; pass kind")
    if not named:
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
    return dataclasses.replace(entry.call, needs=needs, takes=tuple(entry.sources))


@functools.cache
def _index() -> Mapping[tuple[str, str, str], Entry]:
    return {(entry.kind, entry.system, entry.name): entry for entry in ENTRIES}


def _arguments(entry: Entry, function: str) -> dict[str, Any]:
    call = require_call(entry)
    if call.function != function or call.scale != 1 or call.times or call.then or call.plus:
        raise ValueError(f"{entry.key} is {call!r}, which arguments of {function} do not express")
    return copy.deepcopy(dict(call.arguments))
