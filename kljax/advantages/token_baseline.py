"""A baseline for every position: the one of least variance, given how much each row's gradient varies up to there."""

from typing import get_args

import jax
import jax.numpy as jnp

from kljax._checks import as_float, as_groups, check_at_least, check_choice, check_mask, check_same_shape
from kljax._devices import auto_sharded, greatest, over_devices
from kljax._typing import (
    Array,
    ArrayLike,
    AxisName,
    BaselineAlignment,
    Float,
    Integer,
    Mask,
    MaskLike,
    Real,
    Scalar,
    Singleton,
)
from kljax.advantages._groups import SINGLETONS, safe_ids
from kljax.advantages.temporal import reinforce_plus_plus_returns
from kljax.batches import Groups, Segments
from kljax.masking import masked
from kljax.rows import narrowed, positions, row_count, row_cumsum, row_first, row_max, segment_ids, to_tokens

__all__ = ["otb_advantages"]

ALIGNMENTS = get_args(BaselineAlignment)


@auto_sharded
def otb_advantages(
    token_rewards: Real[ArrayLike, "B T"],
    old_log_probs: Float[ArrayLike, "B T"],
    sum_squared_probs: Real[ArrayLike, "B T"],
    mask: MaskLike[Mask, "B T"],
    group_ids: Integer[ArrayLike, "..."] | Groups,
    *,
    num_groups: int | None = None,
    weights: Real[ArrayLike, "B T"] | None = None,
    align: BaselineAlignment = "token",
    zero_tail: bool = True,
    eps: Scalar = 0.0,
    singleton: Singleton = "zero",
) -> tuple[Array, Array]:
    """Returns minus the optimal token baseline: `A_it = G_it - sum_j W_jt G_jt / (sum_j W_jt + eps)` over the group.

    `G_t` is the sum of the rewards from token `t` on, and `W_t = sum_{u <= t} w_u^2 (1 - 2 pi_u + sum_v pi_u(v)^2)` the
    squared norm of the row's score function up to `t` (to the logits), which is what a baseline's variance weighs by.

    Args:
      token_rewards: `[B, T]`, rewards per token; masked ones are ignored.
      old_log_probs: log-probs of the policy that is about to be trained, in nats; a constant.
      sum_squared_probs: `sum_v pi(v)^2` over the vocabulary: `jnp.exp(2 * vocab_log_probs).sum(-1)`.
      mask: boolean or `Segments`; of the latter, the "position" of a token counts from the start of its
        segment.
      group_ids: `[B]` integers below `num_groups`, the prompt of each row, negative on padding rows; or `Groups`. A row
        without a single token is a padding row too.
      num_groups: static number of groups, unless they are `Groups`.
      weights: same shape as the mask: importance weights `w` of the tokens; None weighs each 1.
      align: which tokens of the rows of a group share a baseline: "token", the n-th unmasked ones (verl's
        tir_optimal_token_baseline), or "position", all at the same position (optimal_token_baseline). The two are the
        same where the rows of a group have no holes and begin at the same position.
      zero_tail: whether a row longer than all others has no baseline where it is alone. Otherwise its baseline there is
        its own return and its advantage 0. The tail begins where the second longest row would end without its holes.
      eps: added to the sum of the weights; verl 1e-8.
      singleton: a row alone in its group: "zero" gives it advantage 0; "reward" no baseline, as in verl.

    Returns:
      `(advantages, returns)`, both `[B, T]`, float32 or float64, in the unit of the rewards; masked positions and
      padding rows hold 0.

    Raises:
      ValueError: for an unknown option, differing shapes, a negative `eps`, or a group id of `num_groups` or more.
        Under jit such an id cannot be seen and makes the row's advantages NaN.

    References:
      verl 0.9.1, `compute_optimal_token_baseline_advantage`; Greensmith et al., "Variance reduction techniques for
      gradient estimates in reinforcement learning" (2004), theorem 8.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, log_probs = jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.log(jnp.array([[0.5, 0.5], [0.9, 0.5]]))
      >>> squares, mask, groups = jnp.full((2, 2), 0.5), jnp.ones((2, 2), bool), jnp.array([0, 0])
      >>> squares = squares.at[1, 0].set(0.82)
      >>> advantages, returns = kljax.otb_advantages(rewards, log_probs, squares, mask, groups, num_groups=1)
      >>> print(f"{advantages[0, 0]:.4f} {advantages[0, 1]:.4f}")
      0.0385 0.3421
    """
    check_choice("align", align, ALIGNMENTS)
    check_choice("singleton", singleton, SINGLETONS)
    check_at_least("eps", eps, 0)
    arrays = {"token_rewards": token_rewards, "old_log_probs": old_log_probs, "sum_squared_probs": sum_squared_probs}
    rows, _ = check_same_shape(**arrays, mask=mask, weights=weights)
    groups = as_groups(group_ids, num_groups)
    unmasked = check_mask(mask)
    ids, real, unknown = safe_ids(groups)
    axis_name = groups.axis_name
    if isinstance(mask, Segments):
        check_same_shape(group_ids=ids, mask=mask)
    elif ids.shape != (rows,):
        raise ValueError(f"group_ids: got shape {list(ids.shape)}, expected [{rows}], one per row")
    else:
        ids = ids[:, None]
        real = real[:, None]
        unknown = unknown[:, None]
    weights = jnp.ones(unmasked.shape, jnp.float32) if weights is None else weights
    rewards, log_probs, squares, weights = as_float(*arrays.values(), weights)
    keep = narrowed(mask, unmasked & real)
    returns = reinforce_plus_plus_returns(rewards, keep)
    squared_norms = jnp.square(masked(weights, keep)) * (1 - 2 * jnp.exp(masked(log_probs, keep)) + squares)
    energies = masked(row_cumsum(masked(squared_norms, keep), keep), keep)
    places, shared = _places(keep, align)
    sums = [_add_up(ids, shared, array, groups.count) for array in (energies, energies * returns)]
    weight, value = over_devices(sums, axis_name)
    weight = weight + jnp.asarray(eps, weight.dtype)
    baselines = jnp.where(weight != 0, value / jnp.where(weight != 0, weight, 1), 0)
    token_baselines = baselines[ids, jnp.maximum(shared, 0)]
    lengths = row_count(keep)
    # The group of each sequence; one without a token has length 0 in any group.
    of_rows = row_max(ids, keep, initial=0) if isinstance(mask, Segments) else ids
    if zero_tail:
        longest, next_longest = _two_longest(lengths.ravel(), of_rows.ravel(), groups.count, axis_name)
        is_longest = to_tokens(lengths, mask) == longest[ids]
        alone = is_longest & (next_longest[ids] < longest[ids])
        token_baselines = jnp.where(alone & (places >= next_longest[ids]), 0, token_baselines)
    members = jax.ops.segment_sum((lengths > 0).ravel().astype(int), of_rows.ravel(), num_segments=groups.count)
    single = (over_devices(members, axis_name) == 1)[ids]
    token_baselines = jnp.where(single, returns if singleton == "zero" else 0, token_baselines)
    return jnp.where(unknown & unmasked, jnp.nan, masked(returns - token_baselines, keep)), returns


def _places(keep: Mask, align: BaselineAlignment) -> tuple[Array, Array]:
    """Finds where the tokens of a group meet, `[B, T]`: the place of each in its sequence, and the one it shares."""
    if align == "token":
        places = row_cumsum(check_mask(keep), keep) - 1
        return places, places
    shared = positions(check_mask(keep))
    ids = segment_ids(keep)
    first = to_tokens(row_first(keep), keep)
    if ids is None:
        return shared - first, shared
    inside = ids >= 0
    start = to_tokens(row_first(narrowed(keep, inside)), keep)
    return shared - first, jnp.where(inside, shared - start, 0)


def _add_up(ids: Array, places: Array, values: Array, num_groups: int) -> Array:
    """Adds up the `[B, T]` values of each group, each at its place: `[G, T]`."""
    start = jnp.zeros((num_groups, values.shape[1]), values.dtype)
    return start.at[jnp.broadcast_to(ids, places.shape), jnp.maximum(places, 0)].add(values)


def _two_longest(lengths: Array, ids: Array, num_groups: int, axis_name: AxisName) -> tuple[Array, Array]:
    """Finds the length of the longest sequence of each group, and of the next one, which may be as long: `[G]`."""
    longest = greatest(jax.ops.segment_max(lengths, ids, num_segments=num_groups), axis_name)
    is_longest = lengths == longest[ids]
    shared = over_devices(jax.ops.segment_sum(is_longest.astype(int), ids, num_segments=num_groups), axis_name) > 1
    others = greatest(jax.ops.segment_max(jnp.where(is_longest, 0, lengths), ids, num_segments=num_groups), axis_name)
    return longest, jnp.where(shared, longest, jnp.maximum(others, 0))
