"""The KL to the reference as a shift of the advantages whose sum over the batch is zero."""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_mask, check_numbers, check_only_with, check_same_shape
from kljax._devices import over_devices
from kljax._typing import Array, ArrayLike, AxisName, Estimator, Float, Mask, MaskLike, Real, Scalar
from kljax.advantages.group import per_token
from kljax.aggregation import WeightedSum
from kljax.kl import estimate_kl

__all__ = ["centered_kl_advantages"]


def centered_kl_advantages(
    advantages: Real[ArrayLike, "..."],
    log_probs: Float[ArrayLike, "*b T"],
    ref_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    coef: Scalar,
    estimator: Estimator = "k1",
    mean_kl: Scalar | WeightedSum | None = None,
    axis_name: AxisName = None,
) -> tuple[Array, Array]:
    """Advantages lowered where a token drifted more than the average and raised where less: `A + coef (mean_kl - kl)`.

    `mean_kl = sum_t m_t kl_t / sum_t m_t` over every unmasked token of the whole batch, so the shifts sum to zero:
    the penalty moves probability between tokens and does not push the reward as a whole down. That holds only if the
    mean is the mean of the whole batch. A batch that is processed in parts therefore passes `mean_kl`: the sum over the
    parts of `WeightedSum.of(estimate_kl(...), mask)`, or its value. Inside `shard_map` or `pmap`, `axis_name` adds over
    devices; under `jit` with sharded arrays nothing is needed.

    Args:
      advantages: `[..., T]`, or `[...]`, which is given to every unmasked token of its row.
      log_probs: `[..., T]` log-probs of the policy, in nats.
      ref_log_probs: log-probs of the reference.
      coef: weight of the KL, in advantage per nat, at least 0; 0 leaves the advantages untouched.
      estimator: any name `estimate_kl` knows; "k1" is that of ART.
      mean_kl: mean KL of the whole batch, as a scalar or a `WeightedSum`; None takes it from the arrays given here.
      axis_name: mapped axis or axes over which the batch is split; excludes `mean_kl`.

    Returns:
      `(advantages, mean_kl)`: `[..., T]`, masked positions hold 0, and the scalar mean KL in nats (0 if there is no
      unmasked token); float32 or float64.

    Gradient:
      The KL is detached: nothing flows to `log_probs` or `ref_log_probs`. 1 to `advantages`.

    Raises:
      ValueError: for an unknown estimator, differing shapes, a negative `coef`, or both `mean_kl` and `axis_name`.

    References:
      OpenPipe ART 0.5.18, `art.loss.loss_fn` with `kl_penalty_coef`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, ref, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.5, -1.0]]), jnp.array([[1, 1]])
      >>> print(*kljax.centered_kl_advantages(jnp.array([1.0]), lp, ref, mask, coef=1.0))
      [[0.75 1.25]] 0.25
    """
    check_numbers(mean_kl=mean_kl)
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask)
    check_at_least("coef", coef, 0)
    check_only_with(
        mean_kl is None, "has no meaning with mean_kl, which is of the whole batch", {"axis_name": axis_name}
    )
    advantages, log_probs, ref_log_probs = as_float(advantages, log_probs, ref_log_probs)
    advantages = per_token(advantages, mask)
    kl = jax.lax.stop_gradient(estimate_kl(log_probs, ref_log_probs, mask, estimator=estimator))
    if mean_kl is None:
        mean_kl = over_devices(WeightedSum.of(kl, mask), axis_name)
    if isinstance(mean_kl, WeightedSum):
        mean_kl = mean_kl.value()
    mean = jax.lax.stop_gradient(jnp.asarray(mean_kl, kl.dtype))
    coef = jnp.asarray(coef, kl.dtype)
    # Without the `where`, a coefficient of 0 would turn an infinite KL into NaN.
    shift = jnp.where(check_mask(mask) & (coef != 0), coef * (mean - kl), 0)
    return advantages + shift, mean
