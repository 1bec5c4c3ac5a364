"""Importance ratios between two policies at the sampled tokens: per token, per sequence, or length-normalised.

With `d_t = log_probs_t - old_log_probs_t` and the mask `m`, a sequence `y` has three ratios:

    token      r_t = exp(d_t)                       [..., T]
    sequence   r   = exp(sum_t m_t d_t)             [...]
    geometric  r   = exp(sum_t m_t d_t / sum_t m_t) [...]

The mask is applied before `exp`, so a log-prob that is NaN or infinite at a masked position reaches nothing. These are
plain differentiable functions. Ratios of two recorded policies (old against rollout) are constants without a gradient
because their log-probs are; whoever recorded the log-probs stopped the gradient. Arrays are `[..., T]`.
"""

from typing import get_args

import jax.numpy as jnp

from kljax._checks import NUMBER, as_float, check_at_least, check_choice, check_log_probs, check_mask, check_same_shape
from kljax._devices import greatest
from kljax._numerics import clip_symmetric
from kljax._typing import Array, ArrayLike, AxisName, Float, Level, Mask, MaskLike, Scalar
from kljax.batches import Segments
from kljax.masking import masked
from kljax.rows import row_any, row_mean, row_sum, to_tokens

__all__ = ["geometric_ratios", "log_ratios", "sequence_ratios", "token_ratios"]

LEVELS = get_args(Level)


def log_ratios(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    log_ratio_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """Log-ratio of each token: `d = log pi - log pi_old`, clipped to `[-c, c]` if `c = log_ratio_clip` is given.

    Args:
      log_probs: `[..., T]` log-probs of the numerator policy, in nats.
      old_log_probs: log-probs of the denominator policy.
      log_ratio_clip: bound of the log-ratio, in nats; None does not clip. verl and OpenRLHF use 20.

    Returns:
      `[..., T]`, float32 or float64, in nats; masked positions hold 0. A token without probability under both policies
      has no ratio: NaN.

    Gradient:
      1 to `log_probs` and -1 to `old_log_probs`; 0 outside the clip (1 on the bound, as in PyTorch) and under the mask.

    Raises:
      ValueError: if the shapes differ or the bound is not positive.
      TypeError: if the mask has a floating type.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.log_ratios(jnp.array([-1.0, 0.0]), jnp.array([-1.5, jnp.nan]), jnp.array([True, False])))
      [0.5 0. ]
    """
    check_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, mask=mask)
    check_at_least("log_ratio_clip", log_ratio_clip, 0, strict=True)
    log_probs, old_log_probs = as_float(log_probs, old_log_probs)
    log_probs = masked(log_probs, mask)
    old_log_probs = masked(old_log_probs, mask)
    check_log_probs(log_probs=log_probs, old_log_probs=old_log_probs)
    return clip_symmetric(log_probs - old_log_probs, log_ratio_clip)


def token_ratios(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    log_ratio_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """Importance ratio of each token: `r_t = pi(y_t) / pi_old(y_t) = exp(d_t)`.

    Args:
      log_probs: `[..., T]` log-probs of the numerator policy, in nats.
      old_log_probs: log-probs of the denominator policy.
      log_ratio_clip: bound of `d_t`, in nats; None does not clip.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.

    Gradient:
      `r_t` to `log_probs`, `-r_t` to `old_log_probs`; 0 outside the clip and under the mask.

    Raises:
      ValueError: if the shapes differ or the bound is not positive.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.token_ratios(jnp.log(jnp.array([0.5, 0.9])), jnp.log(jnp.array([0.25, 0.9])), jnp.array([1, 1])))
      [2. 1.]
    """
    return masked(jnp.exp(log_ratios(log_probs, old_log_probs, mask, log_ratio_clip=log_ratio_clip)), mask)


def sequence_ratios(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    log_ratio_clip: Scalar | None = None,
) -> Array:
    """Importance ratio of each sequence: the product of its token ratios, `exp(sum_t m_t d_t)`.

    Args:
      log_probs: `[..., T]` log-probs of the numerator policy, in nats.
      old_log_probs: log-probs of the denominator policy.
      mask: boolean or `Segments`.
      log_ratio_clip: bound of the sum `sum_t m_t d_t`, in nats; None does not clip.

    Returns:
      `[...]` (no T), float32 or float64; 1 for a row without a token, the product over nothing. With `Segments`
      `[..., T]`: each unmasked token has the ratio of its segment, and masked positions hold 0.

    Gradient:
      `m_t r` to `log_probs` at `t`; 0 outside the clip.

    Raises:
      ValueError: if the shapes differ or the bound is not positive.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.sequence_ratios(jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -1.5]]), jnp.array([[1, 1]])))
      [1.]
    """
    return _row_ratios(log_probs, old_log_probs, mask, "sequence", log_ratio_clip)


def geometric_ratios(
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    log_ratio_clip: Scalar | None = None,
) -> Array:
    """Length-normalised ratio of each sequence: the geometric mean of its token ratios, `exp(sum_t m_t d_t / n)`.

    Args:
      log_probs: `[..., T]` log-probs of the numerator policy, in nats.
      old_log_probs: log-probs of the denominator policy.
      mask: boolean or `Segments`; `n` is the number of unmasked tokens of the row.
      log_ratio_clip: bound of the mean `sum_t m_t d_t / n`, in nats; None does not clip.

    Returns:
      `[...]` (no T), float32 or float64; 1 for a row without a token. With `Segments` `[..., T]`: each unmasked
      token has the ratio of its segment, and masked positions hold 0.

    Gradient:
      `m_t r / n` to `log_probs` at `t`; 0 outside the clip.

    Raises:
      ValueError: if the shapes differ or the bound is not positive.

    References:
      Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 7.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old = jnp.log(jnp.array([[0.8, 0.5]])), jnp.log(jnp.array([[0.2, 0.5]]))
      >>> print(kljax.geometric_ratios(lp, old, jnp.array([[1, 1]])).round(4))
      [2.]
    """
    return _row_ratios(log_probs, old_log_probs, mask, "geometric", log_ratio_clip)


def level_log_ratios(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    mask: Mask,
    level: Level,
    log_ratio_clip: Scalar | None = None,
) -> Array:
    """Computes the log-ratio of a level, clipped after it is reduced.

    Args:
      log_probs: `[..., T]` log-probs of the numerator policy, in nats.
      old_log_probs: log-probs of the denominator policy.
      level: "token", "sequence" (sum over the sequence) or "geometric" (mean over the sequence).
      log_ratio_clip: bound of the result, in nats; None does not clip.

    Returns:
      `[..., T]` for "token", else `[..., S]` (see `kljax.rows`), in nats; 0 for a masked token or an empty sequence.
    """
    check_choice("level", level, LEVELS)
    check_at_least("log_ratio_clip", log_ratio_clip, 0, strict=True)
    values = log_ratios(log_probs, old_log_probs, mask)
    if level == "sequence":
        values = row_sum(values, mask)
    elif level == "geometric":
        values = row_mean(values, mask)
    return clip_symmetric(values, log_ratio_clip)


def level_mask(mask: Mask, level: Level) -> Array:
    """Tells which values of `level_log_ratios` count.

    Args:
      mask: `[..., T]`, boolean.
      level: the level of the values.

    Returns:
      `[..., T]` booleans, the unmasked tokens, for "token"; else `[..., S]`, the sequences that have one.
    """
    return check_mask(mask) if level == "token" else row_any(mask)


def level_to_tokens(values: Array, mask: Mask, level: Level) -> Array:
    """Gives every token the value of its level.

    Args:
      values: `[..., T]` for "token", else `[..., S]`, as of `level_log_ratios`.
      mask: `[..., T]`, boolean.
      level: the level of the values.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.
    """
    return masked(values if level == "token" else to_tokens(values, mask), mask)


def check_bounds(
    lower: Scalar | None,
    upper: Scalar | None,
    *,
    needed: bool = True,
    low: float | None = None,
    names: tuple[str, str] = ("lower", "upper"),
) -> None:
    """Checks the bounds of a ratio or a divergence; traced bounds pass.

    Args:
      lower: lowest value kept; None has no lower bound.
      upper: highest value kept; None has no upper bound.
      needed: whether at least one of the two must be given.
      low: the smallest value that a bound may have; None allows any.
      names: of the two arguments, for messages.

    Raises:
      ValueError: for bounds in the wrong order, below `low`, or none at all.
    """
    if needed and lower is None and upper is None:
        raise ValueError(f"{', '.join(names)}: got None for both, expected at least one bound")
    if low is not None:
        check_at_least(names[0], lower, low)
        check_at_least(names[1], upper, low)
    if isinstance(lower, NUMBER) and isinstance(upper, NUMBER) and lower > upper:
        raise ValueError(f"{names[0]}: got {lower!r}, expected at most {names[1]} = {upper!r}")


def within(values: Array, lower: Scalar | None, upper: Scalar | None) -> Array:
    """Tells which values lie within bounds, `lower <= values <= upper`.

    Args:
      values: numbers of any shape and float type.
      lower: lowest value within; None has no lower bound.
      upper: highest value within; None has no upper bound.

    Returns:
      Booleans in the shape of `values`; NaN is never within.
    """
    low = jnp.asarray(-jnp.inf if lower is None else lower, values.dtype)
    high = jnp.asarray(jnp.inf if upper is None else upper, values.dtype)
    return (values >= low) & (values <= high)


def largest(values: Array, kept: Array, axis_name: AxisName) -> Array:
    """Takes the largest of the values kept: in its unit no mean overflows or vanishes.

    Args:
      values: numbers of any shape, usually log-weights.
      kept: boolean.
      axis_name: mapped axes, as of `shard_map`, over whose parts it is taken as well.

    Returns:
      A scalar without a gradient; 0 if the largest value is not finite.
    """
    largest = greatest(jnp.max(jnp.where(kept, values, -jnp.inf), initial=-jnp.inf), axis_name)
    return jnp.where(jnp.isfinite(largest), largest, 0)


def _row_ratios(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    mask: Mask,
    level: Level,
    log_ratio_clip: Scalar | None,
) -> Array:
    ratios = jnp.exp(level_log_ratios(log_probs, old_log_probs, mask, level, log_ratio_clip))
    return level_to_tokens(ratios, mask, level) if isinstance(mask, Segments) else ratios[..., 0]
