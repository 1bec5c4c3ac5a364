"""Looking a name up: the row, or the call, or its arguments."""

import copy
import functools
from collections.abc import Mapping
from typing import Any

from kljax._checks import check_choice
from kljax.systems._data.table import ROWS
from kljax.systems._row import KINDS, SYSTEMS, Call, Row


def rows(*, system: str | None = None, kind: str | None = None, name: str | None = None) -> tuple[Row, ...]:
    """The rows of the table, all of them or those of one system, kind or name.

    Args:
      system: "trinity", "skyrl", "slime", "art", "verl", "openrlhf", "trl" or "prime-rl"; None for every system.
      kind: "kl", "reduction", "advantage", "policy_loss", "value_loss", "correction", "controller", "placement",
        "distillation" or "statistic"; None for every kind.
      name: a name as the systems spell it; None for every name. One that no row has gives no rows.

    Returns:
      A tuple of `Row`, in the order of the table.

    Gradient:
      None; it is a table.

    Raises:
      ValueError: for an unknown system or kind.

    Example:
      >>> import kljax
      >>> for row in kljax.systems.rows(kind="kl", name="k3"):
      ...     print(row.system, row.clamps)
      trinity none
      skyrl x to [-20, 20], then the value to [-10, 10]
      verl x to [-20, 20], then the value to [-10, 10]
      slime none
      openrlhf x from below at -10 (since 0.11), the value to [-10, 10]
      trl none
    """
    if system is not None:
        check_choice("system", system, SYSTEMS)
    if kind is not None:
        check_choice("kind", kind, KINDS)
    wanted = {"system": system, "kind": kind, "name": name}
    given = {field: value for field, value in wanted.items() if value is not None}
    return tuple(row for row in ROWS if all(getattr(row, field) == value for field, value in given.items()))


def kl(system: str, name: str) -> dict[str, Any]:
    """What a system's KL estimator is here: the arguments of `estimate_kl`, its arrays apart.

    Some names imply an importance correction (`max_ratio`, or the `given` of the row): those need the log-probs of the
    policy that drew the tokens as `sampling_log_probs` besides.

    Args:
      system: key of the system, such as "verl".
      name: the name as the system spells it, such as "low_var_kl".

    Returns:
      A new dictionary: `kljax.estimate_kl(log_probs, ref_log_probs, mask, **kl(system, name))`.

    Gradient:
      None; what the gradient of the estimate is stands in the row's `gradient`.

    Raises:
      ValueError: for an unknown system or name, with the names that it has; for a name that `estimate_kl` alone does
        not express, with what does.

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
    """What a system's reduction is here: the arguments of `token_weights`, its mask apart.

    Lengths, group ids and numbers of groups are the user's: the `given` of the row says what they are in the system.

    Args:
      system: key of the system, such as "trinity".
      name: the name as the system spells it, such as "seq-mean-token-mean".

    Returns:
      A new dictionary: `kljax.token_weights(mask, **reduction(system, name))`.

    Gradient:
      None; weights are data.

    Raises:
      ValueError: for an unknown system or name, with the names that it has.

    Example:
      >>> import kljax
      >>> kljax.systems.reduction("trinity", "seq-mean-token-mean")
      {'mode': 'seq_mean_token_mean', 'empty_rows': 'count'}
      >>> kljax.systems.reduction("verl", "seq-mean-token-mean")
      {'mode': 'seq_mean_token_mean', 'empty_rows': 'drop'}
    """
    return _arguments(find("reduction", system, name), "token_weights")


def advantage(system: str, name: str) -> Call:
    """What a system's advantage estimator is here: the function, its arguments, and what is applied to its result.

    Args:
      system: key of the system, such as "verl".
      name: the name as the system spells it, such as "grpo".

    Returns:
      A `Call`; the arrays of the function, and what the row's `given` names, are the user's.

    Gradient:
      None; advantages are data.

    Raises:
      ValueError: for an unknown system or name, with the names that it has; for a name without a call, with the reason.

    Example:
      >>> import kljax
      >>> kljax.systems.advantage("verl", "grpo").function
      'grpo_advantages'
    """
    return called(find("advantage", system, name))


def policy_loss(system: str, name: str) -> Call:
    """What a system's policy loss is here: the function and its arguments, with the system's defaults.

    Args:
      system: key of the system, such as "verl".
      name: the name as the system spells it, such as "vanilla".

    Returns:
      A `Call`; the row's `given` says which option of the system each argument is.

    Gradient:
      None; that of the loss stands in the row's `gradient`.

    Raises:
      ValueError: for an unknown system or name, with the names that it has; for a name without a call, with the reason.

    Example:
      >>> import kljax
      >>> kljax.systems.policy_loss("verl", "vanilla")
      kljax.ppo_clip_loss(clip_low=0.2, clip_high=0.2, dual_clip=3.0, log_ratio_clip=20.0)
    """
    return called(find("policy_loss", system, name))


def correction(system: str, name: str) -> Call:
    """What a system's correction for the mismatch of trainer and sampler is here: importance weights, or a mask.

    Args:
      system: key of the system, such as "slime".
      name: the name as the system spells it, such as "vanilla_tis".

    Returns:
      A `Call`; the row's `given` says which option of the system each argument is.

    Gradient:
      None; weights and masks of recorded policies are data.

    Raises:
      ValueError: for an unknown system or name, with the names that it has; for a name without a call, with the reason.

    Example:
      >>> import kljax
      >>> kljax.systems.correction("verl", "rollout_is=token").function
      'importance_weights'
    """
    return called(find("correction", system, name))


def controller(system: str, name: str) -> Call:
    """What a system's control of the KL coefficient, or of its reference, is here.

    Args:
      system: key of the system, such as "verl".
      name: the name as the system spells it, such as "adaptive".

    Returns:
      A `Call` with the system's defaults.

    Gradient:
      None; coefficients are data.

    Raises:
      ValueError: for an unknown system or name, with the names that it has; for a name without a call, with the reason.

    Example:
      >>> import kljax
      >>> kljax.systems.controller("verl", "adaptive")
      kljax.adaptive_kl(coef=0.001, target=0.1, horizon=10000)
    """
    return called(find("controller", system, name))


@functools.cache
def _index() -> Mapping[tuple[str, str, str], Row]:
    return {(row.kind, row.system, row.name): row for row in ROWS}


def find(kind: str, system: str, name: str) -> Row:
    """The row of a name; raises `ValueError` with what is allowed."""
    check_choice("system", system, SYSTEMS)
    check_choice(f"{system} {kind.replace('_', ' ')}", name, [row.name for row in rows(system=system, kind=kind)])
    return _index()[kind, system, name]


def called(row: Row) -> Call:
    """The call of a row; raises `ValueError` with its reason where there is none."""
    if row.call is None:
        raise ValueError(f"{row.key} has no call here: {row.reason}")
    return row.call


def _arguments(row: Row, function: str) -> dict[str, Any]:
    call = called(row)
    if call.function != function or call.scale != 1 or call.times or call.then or call.plus:
        raise ValueError(f"{row.key} is {call!r}, which arguments of {function} do not express")
    return copy.deepcopy(dict(call.arguments))
