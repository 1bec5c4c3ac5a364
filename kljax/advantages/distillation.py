"""Advantages of sampled tokens from another policy's log-probs: a teacher's, or the policy's own of before."""

import jax
import jax.numpy as jnp

from kljax._checks import (
    as_float,
    check_at_least,
    check_at_most,
    check_mask,
    check_numbers,
    check_same_shape,
)
from kljax._devices import auto_sharded
from kljax._numerics import expm1_minus, log_mix
from kljax._typing import Array, ArrayLike, Float, Integer, Mask, MaskLike, Real, Scalar
from kljax.advantages._groups import GroupedRewards, centered, deviations, groups_of_rows, make_part_groups
from kljax.advantages.group import per_token
from kljax.batches import Groups
from kljax.masking import masked
from kljax.rows import row_cumsum, row_sum, to_tokens

__all__ = ["distillation_advantages", "iw_opd_advantages", "jsd_advantages", "kimi_advantages", "topd_advantages"]


def distillation_advantages(
    advantages: Real[ArrayLike, "..."],
    log_probs: Float[ArrayLike, "*b T"],
    teacher_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    coef: Scalar,
) -> Float[Array, "*b T"]:
    """Advantages raised where the teacher likes a token more: `A_t - coef * (log pi - log teacher)`.

    In expectation over tokens drawn from pi, the policy gradient with them is that of the reward minus `coef` times
    KL(pi || teacher). Advantages of zeros give distillation alone (Trinity-RFT's `on_policy_distill`).

    Args:
      advantages: `[..., T]`, or `[...]`, which is given to every unmasked token of its row.
      log_probs: `[..., T]` log-probs of the policy that drew the tokens, in nats.
      teacher_log_probs: log-probs of the teacher.
      coef: weight of the teacher, in advantage per nat, at least 0; 0 leaves the advantages untouched.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.

    Gradient:
      The log-probs are detached: nothing flows to them. 1 to `advantages`.

    Raises:
      ValueError: for differing shapes, or a negative `coef`.

    References:
      slime 0.3.1, `use_opd`; Lu et al., "On-policy distillation" (2025).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, teacher, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-0.5, -3.0]]), jnp.array([[1, 1]])
      >>> print(kljax.distillation_advantages(jnp.array([1.0]), lp, teacher, mask, coef=0.5))
      [[1.25 0.  ]]
    """
    check_same_shape(log_probs=log_probs, teacher_log_probs=teacher_log_probs, mask=mask)
    check_at_least("coef", coef, 0)
    return _less_log_ratio(advantages, log_probs, teacher_log_probs, mask, coef)


def kimi_advantages(
    advantages: Real[ArrayLike, "..."],
    log_probs: Float[ArrayLike, "*b T"],
    old_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    tau: Scalar,
) -> Float[Array, "*b T"]:
    """Advantages lowered where the policy has already moved up: `A_t - tau * (log pi - log pi_old)`.

    Evaluated at every update, it makes the policy gradient that of the squared difference between `A_t` and `tau` times
    the log-ratio: the policy comes to rest at `pi_old * exp(A / tau)`, without a clip.

    Args:
      advantages: `[..., T]`, or `[...]`, which is given to every unmasked token of its row.
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy that drew the tokens.
      tau: weight of the log-ratio, in advantage per nat, at least 0; 0 leaves the advantages untouched.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.

    Gradient:
      The log-probs are detached: nothing flows to them. 1 to `advantages`.

    Raises:
      ValueError: for differing shapes, or a negative `tau`.

    References:
      Kimi Team, "Kimi K2" (2025), section 3.2.3; OpenPipe ART 0.5.18, `kimi_k2_tau`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, old, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -1.0]]), jnp.array([[1, 1]])
      >>> print(kljax.kimi_advantages(jnp.array([1.0]), lp, old, mask, tau=0.25))
      [[0.75 1.  ]]
    """
    check_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, mask=mask)
    check_at_least("tau", tau, 0)
    return _less_log_ratio(advantages, log_probs, old_log_probs, mask, tau)


def jsd_advantages(
    log_probs: Float[ArrayLike, "*b T"],
    teacher_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    beta: Scalar = 0.5,
    coef: Scalar = 1.0,
) -> Float[Array, "*b T"]:
    """Trinity-RFT's `jsd`: `A = -coef * (beta * (t - m) + (1 - beta) * (s - m))`, `m = log((1 - beta) e^s + beta e^t)`.

    `s` and `t` are the log-probs that the policy and the teacher give the sampled token. At `beta` 0 it is
    `coef * (t - s)`, and at 1 `coef * (s - t)`, which pushes away from the teacher. In between, `A` is never negative
    and grows with the difference of the two, whichever is larger: it is not an estimate of a Jensen-Shannon divergence
    and does not lead to the teacher. `generalized_jsd` is the divergence.

    Args:
      log_probs: `[..., T]` log-probs of the policy that drew the tokens, in nats. A temperature divides both first.
      teacher_log_probs: log-probs of the teacher.
      beta: weight of the teacher in the mixture, between 0 and 1.
      coef: scale of the advantages.

    Returns:
      `[..., T]`, float32 or float64; masked positions hold 0.

    Gradient:
      The log-probs are detached: nothing flows to them.

    Raises:
      ValueError: for differing shapes, or a `beta` outside of [0, 1].

    References:
      Trinity-RFT 0.6.0, `JSDAdvantage`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, teacher, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -3.0]]), jnp.array([[1, 1]])
      >>> print(kljax.jsd_advantages(lp, teacher, mask, beta=0.0))
      [[ 0. -2.]]
    """
    check_numbers(coef=coef)
    check_same_shape(log_probs=log_probs, teacher_log_probs=teacher_log_probs, mask=mask)
    check_at_least("beta", beta, 0)
    check_at_most("beta", beta, 1)
    x = _log_ratio(teacher_log_probs, log_probs, mask)
    beta = jnp.asarray(beta, x.dtype)
    coef = jnp.asarray(coef, x.dtype)
    inside = (beta > 0) & (beta < 1)
    weight = jnp.where(inside, beta, 0.5)
    # The linear terms of the two sides cancel near 0; of `expm1_minus` they are not part in the first place.
    near = jnp.where(jnp.abs(x) <= 1, x, 0)
    gap = jnp.log1p((1 - weight) * expm1_minus(-weight * near) + weight * expm1_minus((1 - weight) * near))
    above = (1 - weight) * x + log_mix(1 - weight, -jnp.maximum(x, 0))
    below = -weight * x + log_mix(weight, jnp.minimum(x, 0))
    gap = jnp.where(jnp.abs(x) <= 1, gap, jnp.where(x > 0, above, below))
    return masked(coef * jnp.where(inside, gap, jnp.where(beta == 0, x, -x)), mask)


def iw_opd_advantages(
    log_probs: Float[ArrayLike, "*b T"],
    teacher_log_probs: Float[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    gamma: Scalar = 1.0,
) -> Float[Array, "*b T"]:
    """Distillation that weighs what comes first: `A_t = a_t (1 + gamma (1 - sum_{u < t} |a_u| / sum_u |a_u|))`.

    `a_t = log teacher - log pi` at the sampled token: where a row has left the teacher early, what follows is a
    consequence of it.

    Args:
      log_probs: `[..., T]` log-probs of the policy that drew the tokens, in nats.
      teacher_log_probs: log-probs of the teacher.
      mask: boolean or `Segments`.
      gamma: how much more the first token weighs than one at the end, at least 0; 0 is `distillation_advantages`.

    Returns:
      `[..., T]`, float32 or float64, in nats; masked positions hold 0.

    Gradient:
      The log-probs are detached: nothing flows to them.

    Raises:
      ValueError: for differing shapes, or a negative `gamma`.

    References:
      TRL 1.16, `IWOPDTrainer`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, teacher, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -2.0]]), jnp.array([[1, 1]])
      >>> print(kljax.iw_opd_advantages(lp, teacher, mask))
      [[-2.  -1.5]]
    """
    check_same_shape(log_probs=log_probs, teacher_log_probs=teacher_log_probs, mask=mask)
    check_at_least("gamma", gamma, 0)
    gain = _log_ratio(teacher_log_probs, log_probs, mask)
    size = jnp.abs(gain)
    total = to_tokens(row_sum(size, mask), mask)
    before = (row_cumsum(size, mask) - size) / jnp.where(total > 0, total, 1)
    return masked(gain * (1 + jnp.asarray(gamma, gain.dtype) * (1 - before)), mask)


@auto_sharded
def topd_advantages(
    log_probs: Float[ArrayLike, "B T"],
    teacher_log_probs: Float[ArrayLike, "B T"],
    mask: MaskLike[Mask, "B T"],
    group_ids: Integer[ArrayLike, "..."] | Groups,
    *,
    num_groups: int | None = None,
    alpha: Scalar = 0.5,
    eps: Scalar = 1e-6,
) -> Float[Array, "B T"]:
    """TOP-D: distillation towards a teacher that is never far: `A_t = (R_t - mean_g R) / max(std_g R, eps)`.

    A token's reward is `r_t = log(alpha rho + 1 - alpha)` with `rho = teacher / pi`: the log-ratio to the mixture
    `alpha teacher + (1 - alpha) pi`, at least `log(1 - alpha)` where the teacher rejects a token. Its return is
    `R_t = r_t + mean_{u > t} r_u`, the rewards to come over their number, and is normalised over all tokens of the rows
    of a prompt, with `n - 1` in the standard deviation.

    Args:
      log_probs: `[B, T]` log-probs of the policy that drew the tokens, in nats.
      teacher_log_probs: log-probs of the teacher.
      mask: boolean or `Segments`.
      group_ids: `[B]` integers below `num_groups`, the prompt of each row, negative on padding rows; or `Groups`. With
        `Segments` `[B, T]`, the prompt of each token's sequence.
      num_groups: static number of groups, unless they are `Groups`.
      alpha: share of the teacher in the mixture, above 0 and at most 1; 1 is the plain log-ratio.
      eps: the least standard deviation; a group without spread gets 0.

    Returns:
      `[B, T]`, float32 or float64; masked positions hold 0.

    Gradient:
      The log-probs are detached: nothing flows to them.

    Raises:
      ValueError: for differing shapes or an `alpha` out of range; as `grpo_advantages` for the groups.

    References:
      "Trust region policy distillation" (TOP-D, arXiv 2607.04751, 2026); prime-rl `topd` (pull request 2966).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> lp, teacher = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.9, 0.1]]))
      >>> groups = {"group_ids": jnp.array([0]), "num_groups": 1}
      >>> print(kljax.topd_advantages(lp, teacher, jnp.array([[1, 1]]), **groups).round(4))
      [[ 0.7071 -0.7071]]
    """
    check_same_shape(log_probs=log_probs, teacher_log_probs=teacher_log_probs, mask=mask)
    check_at_least("alpha", alpha, 0, strict=True)
    check_at_most("alpha", alpha, 1)
    check_numbers(eps=eps)
    gain = _log_ratio(teacher_log_probs, log_probs, mask)
    reward = masked(log_mix(jnp.asarray(alpha, gain.dtype), gain), mask)
    later = to_tokens(row_sum(reward, mask), mask) - row_cumsum(reward, mask)
    unmasked = check_mask(mask).astype(reward.dtype)
    later_tokens = to_tokens(row_sum(unmasked, mask), mask) - row_cumsum(unmasked, mask)
    returns = masked(reward + later / jnp.maximum(later_tokens, 1), mask)
    groups = _groups_of_tokens(returns, mask, group_ids, num_groups)
    distances = centered(groups, groups.weights())
    spread = jnp.maximum(deviations(groups, distances, ddof=1)[0], jnp.asarray(eps, returns.dtype))
    normalised = jnp.where(groups.unknown, jnp.nan, distances / spread[groups.ids])
    return masked(normalised.reshape(returns.shape), mask)


def _groups_of_tokens(
    values: Array, mask: Mask, group_ids: ArrayLike | Groups, num_groups: int | None
) -> GroupedRewards:
    """The unmasked tokens in the groups of their rows, as rows `[B * T]`."""
    members, ids = groups_of_rows(mask, group_ids, num_groups)
    return make_part_groups(values, jnp.where(check_mask(mask), ids, -1), members)


def _log_ratio(log_probs: ArrayLike, other_log_probs: ArrayLike, mask: Mask) -> Array:
    """The difference of the two, detached and 0 under the mask."""
    log_probs, other_log_probs = as_float(log_probs, other_log_probs)
    return jax.lax.stop_gradient(masked(log_probs, mask) - masked(other_log_probs, mask))


def _less_log_ratio(
    advantages: ArrayLike, log_probs: ArrayLike, other_log_probs: ArrayLike, mask: Mask, coef: Scalar
) -> Array:
    advantages, log_probs, other_log_probs = as_float(advantages, log_probs, other_log_probs)
    log_ratio = _log_ratio(log_probs, other_log_probs, mask)
    coef = jnp.asarray(coef, log_ratio.dtype)
    # Without the `where`, a coefficient of 0 would turn an infinite log-ratio into NaN.
    return per_token(advantages, mask) - jnp.where(check_mask(mask) & (coef != 0), coef * log_ratio, 0)
