"""The KL penalty in the reward, and where a sequence's reward lands. Arrays are `[..., T]` unless said otherwise."""

import jax
import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_mask, check_same_shape
from kljax._typing import Array, ArrayLike, Scalar
from kljax.kl import estimate_kl
from kljax.masking import last_token_mask, masked

__all__ = ["distillation_rewards", "kl_shaped_rewards", "place_rewards"]


def place_rewards(scores: ArrayLike, mask: ArrayLike) -> Array:
    """Token rewards of sequence scores: each score lands on the last unmasked token of its row, `R_t = s [t = last]`.

    Args:
      scores: `[...]`, one reward per row, or `[..., T]`, rewards that already are per token.
      mask: `[..., T]`, boolean.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0, and so does a row without a single token.

    Gradient:
      1 to the score at the token it lands on; rewards are usually data.

    Raises:
      ValueError: if `scores` has neither the shape of the mask nor that shape without its last axis.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.place_rewards(jnp.array([2.0]), jnp.array([[1, 1, 0]])))
      [[0. 2. 0.]]
    """
    shape, (scores,) = jnp.shape(mask), as_float(scores)
    if scores.shape == shape:
        return masked(scores, mask)
    if scores.shape != shape[:-1]:
        raise ValueError(
            f"scores: got shape {list(scores.shape)}, expected {list(shape[:-1])} (one per row) or {list(shape)} "
            "(one per token)"
        )
    return masked(jnp.broadcast_to(scores[..., None], shape), last_token_mask(mask))


def kl_shaped_rewards(
    scores: ArrayLike,
    log_probs: ArrayLike,
    ref_log_probs: ArrayLike,
    mask: ArrayLike,
    *,
    coef: Scalar,
    estimator: str = "k1",
    value_clip: Scalar | None = None,
) -> tuple[Array, Array]:
    """Token rewards with the KL to the reference subtracted: `R_t = s [t = last] - coef * kl_t`.

    The KL comes back as it is, neither scaled nor negated nor overwritten, so that what is logged and what drives an
    adaptive controller is the divergence itself.

    Args:
      scores: `[...]`, one reward per row, which lands on the row's last unmasked token; or `[..., T]` token rewards.
      log_probs: `[..., T]` log-probs of the policy that drew the tokens, in nats.
      ref_log_probs: same shape, log-probs of the reference.
      mask: same shape, boolean.
      coef: weight of the KL, in reward per nat; a number or a traced scalar. 0 leaves the rewards untouched, even
        where the KL is infinite.
      estimator: any name `estimate_kl` knows; the expected return under "k1" is the score minus `coef` times the
        sequence KL.
      value_clip: bound of each token's estimate, in nats; None does not clip. OpenRLHF bounds every estimator by 10.

    Returns:
      `(rewards, kl)`, both `[..., T]`, float32 or float64; masked positions hold 0. `kl` is as estimated, in nats.

    Gradient:
      The KL is data: nothing flows to `log_probs` or `ref_log_probs`. 1 to the scores.

    Raises:
      ValueError: for an unknown estimator, differing shapes, a negative `coef`, or a `value_clip` that is not positive.

    References:
      Ziegler et al., "Fine-tuning language models from human preferences" (2019), eq. 2; Ouyang et al.,
      "Training language models to follow instructions" (2022), eq. 2.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, ref, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.5, -1.0]]), jnp.array([[1, 1]])
      >>> rewards, kl = kljax.kl_shaped_rewards(jnp.array([2.0]), lp, ref, mask, coef=0.5)
      >>> print(rewards, kl)
      [[-0.25  2.  ]] [[0.5 0. ]]
    """
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask)
    check_at_least("coef", coef, 0)
    scores, log_probs, ref_log_probs = as_float(scores, log_probs, ref_log_probs)
    kl = estimate_kl(log_probs, ref_log_probs, mask, estimator=estimator, value_clip=value_clip)
    kl = jax.lax.stop_gradient(kl)
    coef = jnp.asarray(coef, kl.dtype)
    # Without the `where`, a coefficient of 0 would turn an infinite KL into NaN.
    penalty = jnp.where(check_mask(mask) & (coef != 0), coef * kl, 0)
    return place_rewards(scores, mask) - penalty, kl


def distillation_rewards(
    log_probs: ArrayLike,
    teacher_log_probs: ArrayLike,
    mask: ArrayLike,
    *,
    coef: Scalar = 1.0,
    estimator: str = "k1",
    value_clip: Scalar | None = None,
) -> Array:
    """The KL to a teacher as a cost per token: `R_t = -coef * kl_t`, `coef * (log teacher - log pi)` with "k1".

    Returns of these rewards charge a token with what follows from it; taken as advantages, as verl and Trinity-RFT do,
    they charge it with its own difference alone.

    Args:
      log_probs: `[..., T]` log-probs of the policy that drew the tokens, in nats.
      teacher_log_probs: same shape, log-probs of the teacher.
      mask: same shape, boolean.
      coef: weight of the KL, in reward per nat, at least 0.
      estimator: any name `estimate_kl` knows; the expected sum under "k1" is minus `coef` times the sequence KL.
      value_clip: bound of the estimate, in nats; None does not clip.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.

    Gradient:
      None: the log-probs are detached.

    Raises:
      ValueError: for an unknown estimator, differing shapes, a negative `coef`, or a bound that is not positive.

    References:
      Lu et al., "On-policy distillation" (2025); verl 0.9.1, distillation with `use_policy_gradient`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, teacher, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-0.5, -3.0]]), jnp.array([[1, 1]])
      >>> print(kljax.distillation_rewards(lp, teacher, mask, coef=0.5))
      [[ 0.25 -1.  ]]
    """
    check_at_least("coef", coef, 0)
    kl = estimate_kl(log_probs, teacher_log_probs, mask, estimator=estimator, gradient="none", value_clip=value_clip)
    coef = jnp.asarray(coef, kl.dtype)
    # Without the `where`, a coefficient of 0 would turn an infinite KL into NaN.
    return jnp.where(check_mask(mask) & (coef != 0), -coef * kl, 0)
