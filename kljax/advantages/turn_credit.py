"""Credit of the turns of an episode, from how good the state is after each."""

import dataclasses

import jax
import jax.numpy as jnp

from kljax._checks import as_array, as_float, as_groups, check_at_least, check_at_most, check_mask, check_same_shape
from kljax._devices import auto_sharded
from kljax._typing import Array, ArrayLike, Bool, Float, Integer, Mask, MaskLike, Real, Scalar
from kljax.advantages._groups import centered, make_groups
from kljax.batches import Groups
from kljax.masking import masked, masked_mean
from kljax.rows import take_by_id

__all__ = ["turn_credit_advantages"]


@auto_sharded
def turn_credit_advantages(
    rewards: Real[ArrayLike, " B"],
    turn_scores: Real[ArrayLike, "B K"],
    scored: Bool[ArrayLike, "B K"],
    turn_ids: Integer[ArrayLike, "B T"],
    mask: MaskLike[Mask, "B T"],
    *,
    group_ids: Integer[ArrayLike, " B"] | Groups,
    num_groups: int | None = None,
    coef: Scalar = 1.0,
    gamma: Scalar = 1.0,
) -> Float[Array, "B T"]:
    """Advantages of turns: `A_t = A + coef (c_turn(t) - c_mean)`, with the mean advantage of a row left as it was.

    The progress of a turn is its score less the one scored before it, 0 for the first one and for turns without a
    score. It is given to that turn and the turns before it in proportion to `gamma^distance`, all of it: `c` of a turn
    is its part of the progress from there on. `A` is the reward and the whole progress of the row, less the mean of
    both over the rows of its prompt; `c_mean` is the mean over the row's tokens.

    Args:
      rewards: `[B]`, one reward per row.
      turn_scores: `[B, K]`, how good the state is after each turn; anything where there is no score.
      scored: boolean, which turns have a score.
      turn_ids: `[B, T]` integers below K, the turn of each sampled token; anything under the mask.
      mask: `[B, T]`, boolean, the sampled tokens; a row without a token belongs to no group.
      group_ids: `[B]` integers below `num_groups`, the prompt of each row, negative on padding rows; or `Groups`.
      num_groups: static number of groups, unless they are `Groups`.
      coef: weight of the turns beside the reward, at least 0; prime-rl's beta.
      gamma: how much less a turn counts for each turn between it and the progress, 0 to 1; 1 shares it equally.

    Returns:
      `[B, T]`, float32 or float64; masked positions and padding rows hold 0.

    Gradient:
      Plain mathematics; rewards and scores are constants.

    Raises:
      ValueError: for differing shapes or a number out of range; as `grpo_advantages` for the groups.

    References:
      prime-rl `turn_credit`; Ng et al., "Policy invariance under reward transformations" (1999) for the differences.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> scores, ids = jnp.array([[0.0, 1.0]]), jnp.array([[0, 0, 1, 1]])
      >>> given = {"group_ids": jnp.array([0]), "num_groups": 1, "gamma": 0.5}
      >>> arrays = jnp.array([1.0]), scores, jnp.array([[True, True]]), ids, jnp.ones((1, 4), bool)
      >>> print(kljax.turn_credit_advantages(*arrays, **given).round(2))
      [[-0.17 -0.17  0.17  0.17]]
    """
    check_at_least("coef", coef, 0)
    check_at_least("gamma", gamma, 0)
    check_at_most("gamma", gamma, 1)
    check_same_shape(turn_scores=turn_scores, scored=scored)
    check_same_shape(turn_ids=turn_ids, mask=mask)
    rewards, scores = as_float(rewards, turn_scores)
    progress = _progress(scores, check_mask(scored, "scored"))
    unmasked = check_mask(mask)
    members = as_groups(group_ids, num_groups)
    check_same_shape(rewards=rewards, group_ids=members.ids)
    members = dataclasses.replace(members, ids=jnp.where(unmasked.any(-1), as_array(members.ids), -1))
    groups = make_groups(rewards + progress.sum(-1), members)
    level = jnp.where(groups.unknown, jnp.nan, centered(groups, groups.weights()))
    ids = jnp.where(unmasked & groups.real[..., None], as_array(turn_ids).astype(int), -1)
    credit = take_by_id(_shared_backward(progress, gamma), ids)
    relative = credit - masked_mean(credit, unmasked, axis=-1)[..., None]
    shaped = level[..., None] + jnp.asarray(coef, credit.dtype) * relative
    return masked(jnp.where((groups.real | groups.unknown)[..., None], shaped, 0), unmasked)


def _progress(scores: Array, scored: Array) -> Array:
    """Each score less the last one before it, `[B, K]`."""
    scores = jnp.where(scored, scores, 0)

    def later(before: tuple[Array, Array], after: tuple[Array, Array]) -> tuple[Array, Array]:
        (known, score), (has_score, other) = before, after
        return known | has_score, jnp.where(has_score, other, score)

    known, last = jax.lax.associative_scan(later, (scored, scores), axis=-1)
    none = jnp.zeros_like(scored[..., :1])
    known = jnp.concatenate([none, known[..., :-1]], -1)
    last = jnp.concatenate([none.astype(scores.dtype), last[..., :-1]], -1)
    return jnp.where(scored & known, scores - last, 0)


def _shared_backward(progress: Array, gamma: Scalar) -> Array:
    """`c_k = p_k / z_k + gamma c_{k+1}`, with `z_k = sum_{j <= k} gamma^(k - j)`: every progress is given away once."""
    positions = jnp.arange(progress.shape[-1])
    distance = positions[None, :] - positions[:, None]
    decay = jnp.where(
        distance >= 0, jnp.asarray(gamma, progress.dtype) ** jnp.maximum(distance, 0).astype(progress.dtype), 0
    )
    share = progress / decay.sum(0, keepdims=True)
    # Not a product of matrices, which some devices round to bfloat16.
    return (share[..., None, :] * decay[None]).sum(-1)
