"""References that follow the policy: pure functions from the old reference to the next.

A result has the shapes, dtypes and layout of the reference, so a jitted step that donates its state reuses the memory
of the old one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kljax._checks import as_float, check_at_least, check_at_most
from kljax._typing import Array, ArrayLike, Scalar

__all__ = ["bema_reference", "ema_reference", "refreshed_reference"]

Tree = Any


def ema_reference(reference: Tree, params: Tree, *, decay: Scalar) -> Tree:
    """Averages the weights exponentially: `ref <- decay * ref + (1 - decay) * params`, leaf by leaf.

    To mix every n steps instead of at each, use
    `refreshed_reference(reference, ema_reference(reference, params, decay=decay), step, every=n)`. TRL mixes
    0.6 of the policy (`decay=0.4`) every 512 steps.

    Args:
      reference: pytree of arrays, such as a `Policy`; its dtypes are kept. In bfloat16 a step smaller than 1/256 of a
        weight is lost to rounding: with a decay near 1 keep the average in float32.
      params: pytree of the same structure and shapes, the weights of the policy.
      decay: weight of the old reference, between 0 (takes the policy) and 1 (keeps the reference).

    Returns:
      A pytree like `reference`. Leaves that are not of a floating type come from `params`.

    Raises:
      ValueError: if structure or shapes differ, or `decay` is not between 0 and 1.

    References:
      TRL 1.16, `SyncRefModelCallback`; Tarvainen and Valpola, "Mean teachers are better role models" (2017).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.ema_reference({"w": jnp.zeros(2)}, {"w": jnp.ones(2)}, decay=0.75)["w"])
      [0.25 0.25]
    """
    check_at_least("decay", decay, 0)
    check_at_most("decay", decay, 1)
    _check_same_shapes(reference, params)

    def mix(old: Array, new: Array) -> Array:
        old = jnp.asarray(old)
        new = jnp.asarray(new)
        if not jnp.issubdtype(old.dtype, jnp.floating):
            return new.astype(old.dtype)
        wide_old, wide_new = as_float(old, new)
        weight = 1 - jnp.asarray(decay, wide_old.dtype)
        # From the old value, so that equal weights stay equal; a weight of 1 is exactly the new value.
        mixed = jnp.where(weight == 1, wide_new, wide_old + weight * (wide_new - wide_old))
        return jnp.where(weight == 0, old, mixed.astype(old.dtype))

    return jax.tree.map(mix, reference, params)


def bema_reference(
    average: Tree,
    params: Tree,
    initial: Tree,
    step: ArrayLike,
    *,
    power: Scalar = 0.5,
    bias_power: Scalar = 0.2,
    multiplier: Scalar = 1.0,
    lag: Scalar = 10.0,
    min_rate: Scalar = 0.0,
) -> tuple[Tree, Tree]:
    """BEMA, an average without the lag of an average: `ref = average + a (params - initial)`.

    The average moves by `average <- (1 - b) average + b params`. With `t = lag + multiplier * step` the rates are
    `b = max(t^-power, min_rate)` and `a = t^-bias_power`: the average gets slower with time, and the correction, the
    whole way of the policy so far, smaller.

    Args:
      average: pytree of arrays, the average so far; at the start a copy of `initial`. Its dtypes are kept.
      params: pytree of the same structure and shapes, the weights of the policy.
      initial: likewise, the weights at the start of the average.
      step: the number of finished steps, a scalar that may be traced.
      power: how fast the rate of the average falls, at least 0; 0 takes the policy. The paper's kappa.
      bias_power: how fast the correction falls, at least 0; large values leave the plain average. The paper's eta.
      multiplier: weight of a step in `t`, at least 0; the paper's gamma.
      lag: `t` at step 0, above 0; the paper's rho.
      min_rate: the least `b`, 0 to 1.

    Returns:
      The new average and the reference, pytrees like `average`. Leaves that are not of a floating type come from
      `params`.

    Raises:
      ValueError: if structure or shapes differ, or a number is out of range.

    References:
      Block and Zhang, "EMA without the lag: bias-corrected iterate averaging schemes" (BEMA, 2025); TRL 1.16,
      `BEMACallback`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> start, params = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}
      >>> average, ref = kljax.bema_reference(start, params, start, 6, bias_power=0.5)
      >>> print(average["w"], ref["w"])
      [0.25] [0.5]
    """
    for name, value in (
        ("power", power),
        ("bias_power", bias_power),
        ("multiplier", multiplier),
        ("min_rate", min_rate),
    ):
        check_at_least(name, value, 0)
    check_at_least("lag", lag, 0, strict=True)
    check_at_most("min_rate", min_rate, 1)
    _check_same_shapes(average, params)
    _check_same_shapes(average, initial)
    dtype = jnp.result_type(float)
    age = jnp.asarray(lag, dtype) + jnp.asarray(multiplier, dtype) * jnp.asarray(step, dtype)
    rate = jnp.maximum(age ** -jnp.asarray(power, dtype), min_rate)
    correction = age ** -jnp.asarray(bias_power, dtype)
    moved = ema_reference(average, params, decay=1 - rate)

    def corrected(mean: Array, new: Array, first: Array) -> Array:
        mean = jnp.asarray(mean)
        new = jnp.asarray(new)
        if not jnp.issubdtype(mean.dtype, jnp.floating):
            return mean
        wide_mean, wide_new, wide_first = as_float(mean, new, first)
        return (wide_mean + correction.astype(wide_mean.dtype) * (wide_new - wide_first)).astype(mean.dtype)

    return moved, jax.tree.map(corrected, moved, params, initial)


def refreshed_reference(reference: Tree, params: Tree, step: ArrayLike, *, every: Scalar) -> Tree:
    """Replaces the reference by the policy every few steps: `ref <- params` if `step > 0` and `step % every == 0`.

    Args:
      reference: pytree of arrays, such as a `Policy`; its dtypes are kept.
      params: pytree of the same structure and shapes: the weights of the policy, or any other replacement.
      step: the number of finished steps, an integer scalar that may be traced.
      every: the number of steps between two replacements, a positive integer.

    Returns:
      A pytree like `reference`.

    Raises:
      ValueError: if structure or shapes differ, or `every` is not positive.

    References:
      slime 0.3.1, `ref_update_interval`; Gorbatovski et al., "Learn your reference model" (2024).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> old, new = {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}
      >>> print(*(kljax.refreshed_reference(old, new, step, every=10)["w"] for step in (0, 9, 10)))
      [0. 0.] [0. 0.] [1. 1.]
    """
    check_at_least("every", every, 0, strict=True)
    _check_same_shapes(reference, params)
    step = jnp.asarray(step)
    due = (step > 0) & (step % jnp.asarray(every).astype(step.dtype) == 0)
    return jax.tree.map(lambda old, new: jnp.where(due, jnp.asarray(new).astype(old.dtype), old), reference, params)


def _check_same_shapes(reference: Tree, params: Tree) -> None:
    def check(path: Any, old: ArrayLike, new: ArrayLike) -> None:
        if np.shape(old) != np.shape(new):
            name = jax.tree_util.keystr(path)
            raise ValueError(f"params{name}: got shape {list(np.shape(new))}, expected {list(np.shape(old))}")

    jax.tree_util.tree_map_with_path(check, reference, params)
