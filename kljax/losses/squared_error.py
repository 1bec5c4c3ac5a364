"""The optimum of KL-regularised RL as a regression: squared errors of a row's log-ratio, and no policy gradient.

Under a penalty of `coef * KL(pi || anchor)` the optimal policy has `coef log(pi / anchor) = r - V`, with the soft value
`V` of the prompt. Each loss here is the square of what is left of that equation, for tokens of any policy: it needs no
importance weights to be right at its optimum. They differ in the anchor and in how `V` is found.

Every unmasked token holds the loss of its row; `token_weights(mask, mode="seq_mean_token_mean")` is the mean over rows.
Arrays are `[B, T]`, masked positions exactly 0.
"""

import jax
import jax.numpy as jnp

from kljax._checks import as_array, as_float, check_at_least, check_same_shape
from kljax._devices import auto_sharded
from kljax._numerics import exp_capped, with_gradient_of
from kljax._typing import Array, ArrayLike, Float, Integer, Mask, MaskLike, Real, Scalar
from kljax.advantages._groups import GroupedRewards, centered, groups_of_rows, make_part_groups
from kljax.batches import Groups, Segments
from kljax.losses._surrogate import loss_inputs
from kljax.masking import masked
from kljax.rows import row_any, row_mean, row_sum, to_sequences, to_tokens

__all__ = ["a2po_loss", "flowrl_loss", "gvpo_loss"]


def a2po_loss(
    log_probs: Float[ArrayLike, "*b T"],
    ref_log_probs: Float[ArrayLike, "*b T"],
    advantages: Real[ArrayLike, "*b T"],
    mask: MaskLike[Mask, "*b T"],
    *,
    coef: Scalar = 1e-3,
) -> Float[Array, "*b T"]:
    """A*-PO: a row's loss is `L = (coef S - A)^2` with `S = sum_t (log pi - log ref)` and `A = r - V*`.

    `V* = b log mean_i exp(r_i / b)` over completions of the reference is the value of the optimal policy;
    `opmd_advantages(baseline="logavgexp", tau=b)` subtracts it from the rewards of a group. `A` in the row's loss is
    the mean over its tokens, which are meant to have one advantage.

    Args:
      log_probs: `[..., T]` log-probs of the policy being trained, in nats.
      ref_log_probs: log-probs of the reference; a constant.
      advantages: a constant, equal over a row (`broadcast_to_tokens`).
      mask: boolean or `Segments`.
      coef: strength of the KL penalty, above 0, in the unit of the rewards; the papers' second beta.

    Returns:
      `[..., T]`, float32 or float64, in the squared unit of the rewards; masked positions hold 0.

    Gradient:
      To `log_probs` at `t`: `2 coef (coef S - A)`, times the sum of the weights with which the row's tokens enter the
      total; it vanishes where the row has the log-ratio of the optimal policy.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, or a `coef` that is not positive.

    References:
      Brantley et al., "Accelerating RL for LLM reasoning with optimal advantage regression" (A*-PO, 2025); TRL
      1.16, `A2POTrainer`.

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> ref, ones, mask = jnp.array([[-1.0, -2.0]]), jnp.ones((1, 2)), jnp.array([[1, 1]])
      >>> print(kljax.a2po_loss(ref + 0.5, ref, ones, mask, coef=0.5))
      [[0.25 0.25]]
    """
    check_at_least("coef", coef, 0, strict=True)
    log_probs, ref_log_probs, advantages = loss_inputs(log_probs, ref_log_probs, advantages, mask)
    drift = row_sum(log_probs - ref_log_probs, mask)
    error = jnp.asarray(coef, drift.dtype) * drift - row_mean(advantages, mask)
    return masked(to_tokens(jnp.square(error), mask), mask)


@auto_sharded
def gvpo_loss(
    log_probs: Float[ArrayLike, "B T"],
    old_log_probs: Float[ArrayLike, "B T"],
    advantages: Real[ArrayLike, "B T"],
    mask: MaskLike[Mask, "B T"],
    group_ids: Integer[ArrayLike, "..."] | Groups,
    *,
    num_groups: int | None = None,
    coef: Scalar = 0.1,
) -> Float[Array, "B T"]:
    """GVPO: a row's loss is `L = n / (n - 1) (R - mean_g R - A)^2 / 2` with `R = coef sum_t (log pi - log old)`.

    The soft value is the same for all `n` rows of a prompt and cancels in the difference to their mean: nothing has to
    be estimated. `A` is the reward less the mean of the group, `grpo_advantages(scale="none")`. The mean over the rows
    of a group is half the variance of `R - r`, with `n - 1`.

    `mean_g R` is a constant, of all rows of the group: give the whole update, or `Groups` with an `axis_name`. With
    equal weights of a group's rows the gradient is the same as through it.

    Args:
      log_probs: `[B, T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy that the KL is to, usually the one that drew the tokens; a
        constant.
      advantages: a constant, equal over a row (`broadcast_to_tokens`).
      mask: boolean or `Segments`; a row without a token belongs to no group.
      group_ids: `[B]` integers below `num_groups`, the prompt of each row, negative on padding rows; or `Groups`. With
        `Segments` `[B, T]`, the prompt of each token's sequence.
      num_groups: static number of groups, unless they are `Groups`.
      coef: strength of the KL penalty, above 0, in the unit of the rewards; the paper's beta.

    Returns:
      `[B, T]`, float32 or float64, in the squared unit of the rewards; masked positions and rows alone in their group
      hold 0.

    Gradient:
      To `log_probs` at `t`: `coef n / (n - 1) (R - mean_g R - A)`, times the sum of the weights with which the row's
      tokens enter the total.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, or a `coef` that is not positive; as
        `grpo_advantages` for the groups.

    References:
      Zhang et al., "GVPO: group variance policy optimization for large language model post-training" (2025), as a mean
      squared error; verl-recipe `gvpo`, a sum over rows over `n - 1`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> old, adv, mask = jnp.zeros((2, 1)), jnp.array([[1.0], [-1.0]]), jnp.ones((2, 1), bool)
      >>> print(kljax.gvpo_loss(old + adv, old, adv, mask, jnp.array([0, 0]), num_groups=1, coef=0.5).ravel())
      [0.25 0.25]
    """
    check_at_least("coef", coef, 0, strict=True)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    reward = jnp.asarray(coef, log_probs.dtype) * row_sum(log_probs - old_log_probs, mask)
    groups = _grouped(reward, mask, group_ids, num_groups)
    error = _less_group_mean(reward, groups) - row_mean(advantages, mask)
    size = groups.size[groups.ids]
    share = jnp.where(groups.real & (size > 1), size / jnp.maximum(size - 1, 1), 0).reshape(error.shape)
    return _to_tokens(share * jnp.square(error) / 2, groups, mask)


@auto_sharded
def flowrl_loss(
    log_probs: Float[ArrayLike, "B T"],
    old_log_probs: Float[ArrayLike, "B T"],
    ref_log_probs: Float[ArrayLike, "B T"],
    advantages: Real[ArrayLike, "B T"],
    mask: MaskLike[Mask, "B T"],
    *,
    group_ids: Integer[ArrayLike, "..."] | Groups,
    num_groups: int | None = None,
    log_partition: Real[ArrayLike, "..."] | None = None,
    reward_scale: Scalar = 15.0,
    max_weight: Scalar | None = 10.0,
) -> Float[Array, "B T"]:
    """FlowRL: a row's loss is `L = w (log Z + mean_t log pi - mean_t log ref - reward_scale A)^2`.

    It is trajectory balance with the reference as a prior: at its optimum completions have probabilities in proportion
    to `ref exp(reward_scale A)`, all modes of the reward and not its highest alone, with log-probs over their length.
    `w = min(prod_t r, max_weight)` is a constant weight of the row for tokens of the old policy.

    `log_partition` is the output of a network on the prompt in the paper. Without it `log Z` is the mean of the other
    terms over the group, a constant, as in log-variance objectives: then give all rows of a group together.

    Args:
      log_probs: `[B, T]` log-probs of the policy being trained, in nats.
      old_log_probs: log-probs of the policy that drew the tokens; a constant.
      ref_log_probs: log-probs of the reference; a constant.
      advantages: a constant, equal over a row: rewards normalised in their group, `grpo_advantages`.
      mask: boolean or `Segments`; a row without a token belongs to no group.
      group_ids: `[B]` integers below `num_groups`, the prompt of each row, negative on padding rows; or `Groups`. With
        `Segments` `[B, T]`, the prompt of each token's sequence.
      num_groups: static number of groups, unless they are `Groups`.
      log_partition: `[B]`, `log Z` of each row's prompt, with `Segments` `[B, T]`; None estimates it in the group.
      reward_scale: nats for a reward of 1, above 0; the paper's beta.
      max_weight: the cap of `w`; None does not cap.

    Returns:
      `[B, T]`, float32 or float64, in squared nats; masked positions and rows of no group hold 0.

    Gradient:
      To `log_probs` at `t`: `2 w` times what is squared, over the row's number of tokens, times the sum of the weights
      with which they enter the total; to `log_partition`, if given, the same without the division.

    Raises:
      ValueError: for differing shapes, advantages that are not per token, or a number that is not positive; as
        `grpo_advantages` for the groups.

    References:
      Zhu et al., "FlowRL: matching reward distributions for LLM reasoning" (2025); verl-recipe `flowrl`.
      Richter et al., "VarGrad: a low-variance gradient estimator for variational inference" (2020) for the estimate.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> old, adv, mask = jnp.zeros((2, 1)), jnp.array([[1.0], [-1.0]]), jnp.ones((2, 1), bool)
      >>> groups = {"group_ids": jnp.array([0, 0]), "num_groups": 1}
      >>> print(kljax.flowrl_loss(old, old, old, adv, mask, **groups, reward_scale=2.0).ravel())
      [4. 4.]
    """
    check_at_least("reward_scale", reward_scale, 0, strict=True)
    check_at_least("max_weight", max_weight, 0, strict=True)
    log_probs, old_log_probs, advantages = loss_inputs(log_probs, old_log_probs, advantages, mask)
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    log_probs, reference = as_float(log_probs, masked(as_float(ref_log_probs)[0], mask))
    score = row_mean(log_probs - reference, mask)
    error = score - jnp.asarray(reward_scale, score.dtype) * row_mean(advantages, mask).astype(score.dtype)
    groups = _grouped(error, mask, group_ids, num_groups)
    real = groups.real.reshape(error.shape)
    if log_partition is None:
        error = _less_group_mean(error, groups)
    else:
        error = jnp.where(real, _log_partition(log_partition, mask, error), 0) + error
    weight = exp_capped(jax.lax.stop_gradient(row_sum(log_probs - old_log_probs, mask)), max_weight)
    return _to_tokens(jnp.where(real, weight * jnp.square(error), 0), groups, mask)


def _log_partition(values: ArrayLike, mask: Mask, rows: Array) -> Array:
    """`log Z` of each sequence, `[B, S]`."""
    (values,) = as_float(values)
    if isinstance(mask, Segments):
        check_same_shape(log_partition=values, mask=mask)
        return to_sequences(values, as_array(mask.ids)).astype(rows.dtype)
    check_same_shape(log_partition=values, rows=rows[..., 0])
    return values[..., None].astype(rows.dtype)


def _grouped(values: Array, mask: Mask, group_ids: ArrayLike | Groups, num_groups: int | None) -> GroupedRewards:
    """The sequences that have a token in their groups, with their values `[B, S]`, constants, as rows `[B * S]`."""
    members, ids = groups_of_rows(mask, group_ids, num_groups)
    if isinstance(mask, Segments):
        ids = to_sequences(ids, as_array(mask.ids))
    return make_part_groups(jax.lax.stop_gradient(values), jnp.where(row_any(mask), ids, -1), members)


def _less_group_mean(values: Array, groups: GroupedRewards) -> Array:
    """Values `[B, S]` less the mean of their group, a constant; 0 for sequences of no group."""
    distances = centered(groups, groups.weights()).reshape(values.shape)
    return with_gradient_of(distances, jnp.where(groups.real.reshape(values.shape), values, 0))


def _to_tokens(loss: Array, groups: GroupedRewards, mask: Mask) -> Array:
    """Gives every unmasked token the loss `[B, S]` of its sequence; NaN for a group that does not exist."""
    return masked(to_tokens(jnp.where(groups.unknown.reshape(loss.shape), jnp.nan, loss), mask), mask)
