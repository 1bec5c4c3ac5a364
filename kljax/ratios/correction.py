"""Train/rollout correction as a sequence of steps, in an order that stands in the call."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_mask, check_same_shape
from kljax._typing import Array, ArrayLike, Float, Mask, MaskLike
from kljax.rows import narrowed

__all__ = ["RolloutCorrection", "correct_rollout"]

Step = Callable[[Array, Array, Any], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RolloutCorrection:
    """The outcome of a train/rollout correction: the loss per token is `loss * weights`, reduced over either mask.

    Attributes:
      weights: `[..., T]`, float32 or float64, the product of all weights; 0 where a token is masked or rejected.
      kept: `[..., T]` booleans, the tokens of the mask that no step rejected.
    """

    weights: Array
    kept: Array


def correct_rollout(
    log_probs: Float[ArrayLike, "*b T"],
    rollout_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    steps: Sequence[Step],
) -> RolloutCorrection:
    """Applies weights and rejections in the order given, each to the tokens that the earlier ones left.

    A step is a function `(log_probs, rollout_log_probs, mask) -> [..., T]`: booleans reject, floats are weights that
    multiply. `functools.partial` makes one of `importance_weights` or of any mask of this library, and rejections that
    are to see the same mask are one step: `lambda *x: first(*x) & second(*x)`.

    Nothing is divided here. The caller reduces with token weights of the mask he means: weights of the original mask
    keep the denominators (slime, SkyRL, OpenRLHF, TRL: a rejected token counts as zero loss), weights of `kept` average
    over what is left (verl).

    Args:
      log_probs: `[..., T]` log-probs of the policy the loss is about (usually the old policy), in nats; a constant.
      rollout_log_probs: log-probs recorded by the sampler.
      mask: boolean or `Segments`, which the steps then get.
      steps: functions as above, applied from the first to the last; none leaves the weights 1.

    Returns:
      `RolloutCorrection` with the weights and the tokens kept. Weights of 0 (IcePop's) do not reject.

    Gradient:
      The weights are detached: nothing flows to the log-probs.

    Raises:
      ValueError: if the shapes differ, or a step returns another one.
      TypeError: if a step returns neither booleans nor floats.

    References:
      SkyRL applies outlier veto, token mask, weights, sequence mask in this order; verl the weights first and then
      every rejection to the original mask.

    Example:
      >>> from functools import partial
      >>> import jax.numpy as jnp, kljax
      >>> lp, rollout = jnp.log(jnp.array([[0.9, 0.4, 0.2]])), jnp.log(jnp.array([[0.3, 0.4, 0.4]]))
      >>> steps = [partial(kljax.rejection_mask, lower=0.8), partial(kljax.importance_weights, upper=2.0)]
      >>> corrected = kljax.correct_rollout(lp, rollout, jnp.array([[1, 1, 1]]), steps=steps)
      >>> print(corrected.weights, corrected.kept)
      [[2. 1. 0.]] [[ True  True False]]
    """
    check_same_shape(log_probs=log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    log_probs, rollout_log_probs = jax.lax.stop_gradient(as_float(log_probs, rollout_log_probs))
    unmasked = check_mask(mask)
    weights = jnp.ones(unmasked.shape, log_probs.dtype)
    for index, step in enumerate(steps):
        result = jnp.asarray(step(log_probs, rollout_log_probs, narrowed(mask, unmasked)))
        check_same_shape(**{"mask": unmasked, f"result of steps[{index}]": result})
        if result.dtype == bool:
            unmasked &= result
        elif jnp.issubdtype(result.dtype, jnp.floating):
            # An infinite weight of one step and a zero of another are a zero, not NaN.
            none = (weights == 0) | (result == 0)
            weights = jnp.where(none, 0, weights * result.astype(weights.dtype))
        else:
            raise TypeError(f"steps[{index}]: got dtype {result.dtype}, expected booleans or floating-point weights")
    return RolloutCorrection(jax.lax.stop_gradient(jnp.where(unmasked, weights, 0)), unmasked)
