"""The loss of a value head, per token."""

import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_same_shape
from kljax._numerics import clip as clip_values
from kljax._typing import Array, ArrayLike, Float, Mask, MaskLike, Real, Scalar
from kljax.masking import masked

__all__ = ["value_loss"]


def value_loss(
    values: Real[ArrayLike, "*b T"],
    old_values: Real[ArrayLike, "*b T"] | None,
    returns: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """Takes half the larger of two squared errors: `max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2`.

    Args:
      values: `[..., T]` values `V` being trained, of the state before each token, in the unit of the rewards.
      old_values: the values at the start of the update; a constant. May be None without `clip`.
      returns: the targets `R` (from `gae`); a constant.
      clip: how far `c` the value may move from the old one, positive; None leaves the plain squared error.

    Returns:
      `[..., T]`, float32 or float64, in squared units of the rewards; masked positions hold 0.

    Gradient:
      To `values`: `V - R`, or 0 where the clipped error is the larger one. Whole on the clip's bound; the mean of both
      where the two errors tie.

    Raises:
      ValueError: for differing shapes, a `clip` that is not positive, or a `clip` without `old_values`.

    References:
      Schulman et al., OpenAI baselines `ppo2` (2017); verl `compute_value_loss`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> values, old, returns = jnp.array([[2.0, 1.0]]), jnp.array([[0.0, 1.0]]), jnp.array([[1.0, 3.0]])
      >>> print(kljax.value_loss(values, old, returns, jnp.array([[1, 1]]), clip=0.5))
      [[0.5 2. ]]
    """
    if clip is not None and old_values is None:
        raise ValueError("old_values: got None, expected the values at the start of the update, which clip needs")
    error, clipped_error = value_errors(values, old_values, returns, mask, clip)
    return masked(0.5 * (error if clip is None else jnp.maximum(error, clipped_error)), mask)


def value_errors(
    values: ArrayLike, old_values: ArrayLike | None, returns: ArrayLike, mask: Mask, clip: Scalar | None
) -> tuple[Array, Array]:
    """Squares the errors of the values, and of the values clipped around the old ones.

    Args:
      values: `[..., T]` values being trained, in the unit of the rewards.
      old_values: the values at the start of the update; None only without a clip.
      returns: the targets.
      clip: how far a value may move from the old one, above 0; None does not clip.

    Returns:
      `(error, clipped_error)`, both `[..., T]`, float32 or float64; masked positions hold 0. Without a clip the two are
      the same.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    check_at_least("clip", clip, 0, strict=True)
    values, old_values, returns = as_float(values, values if old_values is None else old_values, returns)
    values = masked(values, mask)
    old_values = masked(old_values, mask)
    returns = masked(returns, mask)
    error = jnp.square(values - returns)
    if clip is None:
        return error, error
    clip = jnp.asarray(clip, values.dtype)
    return error, jnp.square(clip_values(values, old_values - clip, old_values + clip) - returns)
