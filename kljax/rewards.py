"""The KL penalty in the reward, and where a sequence's reward lands. Arrays are `[..., T]` unless said otherwise."""

import jax.numpy as jnp

from kljax._checks import as_float, check_at_least, check_mask, check_same_shape
from kljax._typing import Array, ArrayLike, Estimator, Float, Mask, MaskLike, Real, Scalar
from kljax.batches import Segments
from kljax.kl import estimate_kl
from kljax.masking import last_token_mask, masked

__all__ = ["distillation_rewards", "kl_shaped_rewards", "place_rewards", "subtract_kl"]


def place_rewards(
    scores: Real[ArrayLike, "..."],
    mask: MaskLike[Mask, "*b T"],
) -> Float[Array, "*b T"]:
    """Places each sequence score on the last unmasked token of its row: `R_t = s [t = last]`.

    Args:
      scores: `[...]`, one reward per row, or `[..., T]`, rewards that already are per token. With `Segments`
        `[..., T]`, the reward of each token's sequence.
      mask: `[..., T]`, boolean or `Segments`.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0, and so does a row without a single token.

    Gradient:
      1 to the score at the token it lands on.

    Raises:
      ValueError: if `scores` has neither the shape of the mask nor that shape without its last axis.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.place_rewards(jnp.array([2.0]), jnp.array([[1, 1, 0]])))
      [[0. 2. 0.]]
    """
    return _placed("scores", scores, mask)


def subtract_kl(
    rewards: Real[ArrayLike, "..."],
    kl: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    coef: Scalar,
) -> Float[Array, "*b T"]:
    """Subtracts a KL per token from the rewards: `R_t = r_t - coef * kl_t`.

    The KL may be an estimate from `estimate_kl` or the exact one from `kl_from_hidden`.

    Args:
      rewards: `[...]`, one reward per row, which lands on the row's last unmasked token; or `[..., T]` token rewards.
        With `Segments` `[..., T]`, the reward of each token's sequence.
      kl: `[..., T]`, the KL at each token, in nats; a constant, whose producer stops its gradient.
      mask: boolean or `Segments`.
      coef: weight of the KL, in reward per nat; a number or a traced scalar. 0 leaves the rewards untouched, even
        where the KL is infinite.

    Returns:
      `[..., T]`, float32 or float64, in the unit of the rewards; masked positions hold 0.

    Gradient:
      1 to the rewards and `-coef` to `kl` at unmasked tokens.

    Raises:
      ValueError: for differing shapes or a negative `coef`.

    References:
      Ziegler et al., "Fine-tuning language models from human preferences" (2019), eq. 2.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, kl = jnp.array([2.0]), jnp.array([[0.5, 0.0, jnp.nan]])
      >>> print(kljax.subtract_kl(rewards, kl, jnp.array([[1, 1, 0]]), coef=0.5))
      [[-0.25  2.    0.  ]]
    """
    check_same_shape(kl=kl, mask=mask)
    check_at_least("coef", coef, 0)
    rewards, kl = as_float(rewards, kl)
    coef = jnp.asarray(coef, kl.dtype)
    # Without the `where`, a coefficient of 0 would turn an infinite KL into NaN.
    penalty = coef * jnp.where(check_mask(mask) & (coef != 0), kl, 0)
    return _placed("rewards", rewards, mask) - penalty


def kl_shaped_rewards(
    scores: Real[ArrayLike, "..."],
    log_probs: Float[ArrayLike, "*b T"],
    ref_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    coef: Scalar,
    estimator: Estimator = "k1",
    value_clip: Scalar | None = None,
) -> tuple[Array, Array]:
    """Subtracts the estimated KL to the reference from the rewards: `R_t = s [t = last] - coef * kl_t`.

    The KL is returned unscaled: log it, and drive an adaptive controller with its mean. `subtract_kl` takes a KL that
    is known, such as the exact one.

    Args:
      scores: `[...]`, one reward per row, which lands on the row's last unmasked token; or `[..., T]` token rewards.
        With `Segments` `[..., T]`, the reward of each token's sequence.
      log_probs: `[..., T]` log-probs of the policy that drew the tokens, in nats.
      ref_log_probs: log-probs of the reference.
      mask: boolean or `Segments`.
      coef: weight of the KL, in reward per nat; a number or a traced scalar. 0 leaves the rewards untouched, even
        where the KL is infinite.
      estimator: any name `estimate_kl` knows; the expected return under "k1" is the score minus `coef` times the
        sequence KL.
      value_clip: bound of each token's estimate, in nats; None does not clip. OpenRLHF bounds every estimator by 10.

    Returns:
      `(rewards, kl)`, both `[..., T]`, float32 or float64; masked positions hold 0. `kl` is as estimated, in nats.

    Gradient:
      The KL is treated as a constant: nothing flows to `log_probs` or `ref_log_probs`. 1 to the scores.

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
    check_at_least("coef", coef, 0)
    scores, log_probs, ref_log_probs = as_float(scores, log_probs, ref_log_probs)
    kl = estimate_kl(log_probs, ref_log_probs, mask, estimator=estimator, gradient="none", value_clip=value_clip)
    return subtract_kl(place_rewards(scores, mask), kl, mask, coef=coef), kl


def distillation_rewards(
    log_probs: Float[ArrayLike, "*b T"],
    teacher_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    coef: Scalar = 1.0,
    estimator: Estimator = "k1",
    value_clip: Scalar | None = None,
) -> Float[Array, "*b T"]:
    """Rewards each token with minus the KL to a teacher: `R_t = -coef * kl_t`; k1 is `log pi - log teacher`.

    Returns of these rewards charge a token with what follows from it; taken as advantages, as verl and Trinity-RFT do,
    they charge it with its own difference alone.

    Args:
      log_probs: `[..., T]` log-probs of the policy that drew the tokens, in nats.
      teacher_log_probs: log-probs of the teacher.
      coef: weight of the KL, in reward per nat, at least 0.
      estimator: any name `estimate_kl` knows; the expected sum under "k1" is minus `coef` times the sequence KL.
      value_clip: bound of the estimate, in nats; None does not clip.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.

    Gradient:
      The log-probs are detached: nothing flows to them.

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
    return subtract_kl(jnp.zeros_like(kl), kl, mask, coef=coef)


def _placed(name: str, rewards: ArrayLike, mask: Mask) -> Array:
    """Rewards per row or per token as `[..., T]`, 0 under the mask; `name` is that of the argument in an error."""
    shape = check_same_shape(mask=mask)
    (rewards,) = as_float(rewards)
    if isinstance(mask, Segments):
        if rewards.shape != shape:
            raise ValueError(
                f"{name}: got shape {list(rewards.shape)}, expected {list(shape)}: with kljax.Segments each token has "
                "the reward of its sequence; broadcast_to_tokens gives it one per segment"
            )
        return masked(rewards, last_token_mask(mask))
    if rewards.shape == shape:
        return masked(rewards, mask)
    if rewards.shape != shape[:-1]:
        raise ValueError(
            f"{name}: got shape {list(rewards.shape)}, expected {list(shape[:-1])} (one per row) or {list(shape)} "
            "(one per token)"
        )
    return masked(jnp.broadcast_to(rewards[..., None], shape), last_token_mask(mask))
