"""The tokens of highest entropy, on which alone some recipes train."""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_at_most, check_mask, check_same_shape
from kljax._devices import all_rows, auto_sharded
from kljax._numerics import floor_share
from kljax._typing import Array, ArrayLike, AxisName, Bool, Mask, MaskLike, Real, Scalar

__all__ = ["high_entropy_mask"]


@auto_sharded
def high_entropy_mask(
    entropies: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    fraction: Scalar = 0.2,
    axis_name: AxisName = None,
) -> Bool[Array, "*b T"]:
    """Keeps the tokens of highest entropy: `m_t and H_t >= quantile(H, 1 - fraction)` over the unmasked tokens.

    The quantile is that of all unmasked tokens: give it the whole batch. Of `n` tokens it keeps
    `1 + floor(fraction (n - 1))`, and further ones whose entropy equals the lowest one kept.

    Args:
      entropies: `[..., T]`, entropy of the distribution that each token was drawn from, in nats (`TokenStats.entropy`).
      fraction: share of the tokens to keep, between 0 and 1; 1 keeps all.
      axis_name: mapped axes, as of `shard_map`, over whose parts the batch is spread; their entropies are gathered.

    Returns:
      `[..., T]` booleans, True on tokens to train on; False where the mask is.

    Raises:
      ValueError: for differing shapes, or a `fraction` outside of [0, 1].

    References:
      Wang et al., "Beyond the 80/20 rule: high-entropy minority tokens drive effective reinforcement learning" (2025);
      TRL 1.16, `get_high_entropy_mask`, whose `threshold` is `1 - fraction`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> entropies, mask = jnp.array([[0.1, 2.0, 0.5, 9.0]]), jnp.array([[1, 1, 1, 0]])
      >>> print(kljax.high_entropy_mask(entropies, mask, fraction=0.5))
      [[False  True  True False]]
    """
    check_same_shape(entropies=entropies, mask=mask)
    check_at_least("fraction", fraction, 0)
    check_at_most("fraction", fraction, 1)
    (entropies,) = jax.lax.stop_gradient(as_float(entropies))
    keep = check_mask(mask)
    everything, selectable = all_rows((entropies, keep), axis_name)
    descending = -jnp.sort(jnp.where(selectable, -everything, jnp.inf).ravel())
    if descending.size == 0:
        return keep
    last = floor_share(fraction, jnp.maximum(selectable.sum() - 1, 0), selectable.size)
    return keep & (entropies >= descending[last])
