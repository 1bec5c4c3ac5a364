"""The batch, and the functions that slice and split it.

Slicing and splitting each map over every field that is present, whatever its name: a field added tomorrow travels
through all of them without being listed anywhere.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from train.sequences.token_fields import TOKEN_REWARDS, TURN_IDS, TURN_SCORES, TokenFields

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of tokens with their masks, rewards, log-probs and so on. Position t of a field belongs to token t.

    A row is a sequence from column 0 on, padded on the right. Fields that were not computed are None.

    Attributes:
      tokens: [B, T] int32.
      token_mask: [B, T] bool, True on real tokens, which are attended.
      completion_mask: [B, T] bool, True on the sampled tokens, which are trained.
      prompt_lengths: [B] int32, tokens before the completion, which may begin with an observation; None: all before the
        first sampled one.
      rewards: [B] scalar reward of each row.
      group_ids: [B] int32, number of the row's prompt in the rollout batch; -1 on rows of padding.
      episode_rows: [B] int32, the row whose advantage a row has, of the episode that it forked from; -1 for none. None
        once there are advantages, and where each row is an episode.
      rollout_log_probs: [B, T] log-probs that the sampler recorded.
      old_log_probs: [B, T] log-probs of the policy before its first update on this batch; None if that is the only
        update, which computes them itself.
      ref_log_probs: [B, T] log-probs of the reference.
      ref_hidden: [B, T, D] hidden states of the reference after each token, in the type that the model computes in.
      ref_exact_kl: [B, T] exact KL to the reference where each token was drawn, before the first update.
      sum_squared_probs: [B, T] sum over the vocabulary of the squared probabilities, before the first update.
      values: [B, T] value of the state before each token, before the first update.
      advantages: [B, T].
      returns: [B, T] targets of the value head.
      correction_weights: [B, T] importance weights of the policy term; 0 where a token is rejected.
      kept_mask: [B, T] bool, the tokens of the completion mask that no correction rejected and that were not dropped
        for an advantage of 0, or with an unfinished completion; None if all are kept.
      token_weights: [B, T] weight of each token in the loss of its optimizer batch.
      term_weights: [B, T] by name, the same for terms of the loss that are reduced in another way.
      row_numbers: [B] int32, numbers of the rows in the rollout batch, known inside an update.
      fields: [B, T, ...] by name, the other fields that the source filled in, as `TOKEN_FIELDS` declares them. With
        `kept_ids`, all log-probs of the batch are renormalised over these tokens.
    """

    tokens: Array
    token_mask: Array
    completion_mask: Array
    prompt_lengths: Array | None = None
    rewards: Array | None = None
    group_ids: Array | None = None
    episode_rows: Array | None = None
    rollout_log_probs: Array | None = None
    old_log_probs: Array | None = None
    ref_log_probs: Array | None = None
    ref_hidden: Array | None = None
    ref_exact_kl: Array | None = None
    sum_squared_probs: Array | None = None
    values: Array | None = None
    advantages: Array | None = None
    returns: Array | None = None
    correction_weights: Array | None = None
    kept_mask: Array | None = None
    token_weights: Array | None = None
    term_weights: dict[str, Array] = dataclasses.field(default_factory=dict)
    row_numbers: Array | None = None
    fields: TokenFields = dataclasses.field(default_factory=dict)

    def kept(self) -> Array:
        """Returns the tokens [B, T] that the loss sums over."""
        return self.completion_mask if self.kept_mask is None else self.kept_mask


AnyBatch = TypeVar("AnyBatch", bound=Batch)


def required(field: Array | None) -> Array:
    """Returns a field that the plan of the config needs; raises ValueError if it is None."""
    if field is None:
        raise ValueError("a field of the batch is missing")
    return field


def prompt_lengths(rows: Any) -> Any:
    """Returns the prompt lengths [B] of a batch or of completions; without any the tokens before the first sampled."""
    if rows.prompt_lengths is not None:
        return rows.prompt_lengths
    return (rows.token_mask & (rows.completion_mask.cumsum(-1) == 0)).sum(-1, dtype=np.int32)


def move_columns(x: Any, by: Any, length: int, fill: Any = 0) -> Any:
    """Moves the values of each row to the left by its number of columns, [B, W, ...] and [B] to [B, length, ...].

    Columns that get no value hold `fill`. Arrays of NumPy stay on the host.

    Example:
      >>> move_columns(np.array([[0, 0, 5], [0, 6, 7]]), np.array([2, 1]), 4).tolist()
      [[5, 0, 0, 0], [6, 7, 0, 0]]
    """
    xp: Any = jnp if isinstance(x, jax.Array) else np
    at = np.arange(length) + by[:, None]
    exists = ((at >= 0) & (at < x.shape[1])).reshape(*at.shape, *[1] * (x.ndim - 2))
    index = xp.clip(at, 0, x.shape[1] - 1).reshape(exists.shape)
    return xp.where(exists, xp.take_along_axis(x, index, axis=1), xp.asarray(fill, x.dtype))


def place_rewards(batch: Batch) -> Array:
    """Places rewards on tokens [B, T]: the parts of a row's reward where the source gave them, the rest on the last."""
    rewards = required(batch.rewards)
    mask = batch.completion_mask
    if TOKEN_REWARDS not in batch.fields:
        return kljax.place_rewards(rewards, mask)
    given = kljax.masked(batch.fields[TOKEN_REWARDS], mask)
    return given + kljax.place_rewards(rewards - given.sum(-1), mask)


def turn_scores(batch: Batch, turns: int) -> tuple[Array, Array]:
    """Collects the scores of the turns of each row, `[B, K]`, and which turns have one.

    Args:
      batch: has the turn of each token, and the scores on their last ones.
      turns: K, more than any turn has a number.
    """
    ids = required(batch.fields.get(TURN_IDS))
    scores = required(batch.fields.get(TURN_SCORES))
    known = (ids >= 0) & jnp.isfinite(scores)
    rows = jnp.arange(row_count(batch))[:, None]
    # What has no score is written outside, and dropped.
    places = rows, jnp.where(known, ids, turns)
    none = jnp.zeros((row_count(batch), turns), scores.dtype)
    return none.at[places].set(scores, mode="drop"), none.astype(bool).at[places].set(True, mode="drop")


def per_token_fields(batch: Batch) -> Batch:
    """Returns the batch with the fields that hold one number per token, for functions that treat tokens alone."""
    shape = batch.tokens.shape
    arrays = _own_arrays(batch)
    dropped: dict[str, Any] = dict.fromkeys(name for name, x in arrays.items() if x.shape != shape)
    fields = {name: x for name, x in batch.fields.items() if x.shape == shape}
    return dataclasses.replace(batch, **dropped, fields=fields)


def row_count(batch: Batch) -> int:
    """Returns B."""
    return batch.tokens.shape[0]


def take_rows(batch: AnyBatch, rows: slice | Array) -> AnyBatch:
    """Takes the rows of a slice or of an index array, in its order."""
    return jax.tree.map(lambda x: jnp.asarray(x)[rows], batch)


def micro_batches(batch: AnyBatch, count: int, *, group: int = 1) -> AnyBatch:
    """Splits the rows into `count` micro-batches on a new leading axis: `[B, ...]` becomes `[count, B / count, ...]`.

    Row `r` goes to micro-batch `(r // group) % count`, so that each device keeps the rows it already holds.

    Args:
      group: consecutive rows that stay in one micro-batch.

    Raises:
      ValueError: if `count` micro-batches of whole groups do not make up the batch.
    """
    rows = row_count(batch)
    if rows % (count * group):
        groups = f" in groups of {group}" if group > 1 else ""
        raise ValueError(f"micro_batches: got {count}, which does not divide the {rows} rows of the batch{groups}")

    def split(x: Array) -> Array:
        groups = jnp.asarray(x).reshape(-1, count, group, *x.shape[1:])
        return jnp.swapaxes(groups, 0, 1).reshape(count, -1, *x.shape[1:])

    return jax.tree.map(split, batch)


def merge_micro_batches(tree: Any, *, group: int = 1) -> Any:
    """The inverse of `micro_batches` for any tree of `[count, rows, ...]` arrays."""

    def merge(x: Array) -> Array:
        groups = x.reshape(len(x), -1, group, *x.shape[2:])
        return jnp.swapaxes(groups, 0, 1).reshape(-1, *x.shape[2:])

    return jax.tree.map(merge, tree)


def map_micro_batches(function: Callable[[Any], Any], batch: Batch, count: int, *, group: int = 1) -> Any:
    """Applies a function of rows to one micro-batch after another, and puts its per-row results back in order."""
    done = jax.lax.map(function, micro_batches(batch, count, group=group))
    return merge_micro_batches(done, group=group)


def present_arrays(batch: Batch) -> dict[str, Array]:
    """Returns all arrays of a batch by name, `fields` among them."""
    return _own_arrays(batch) | batch.fields


def _own_arrays(batch: Batch) -> dict[str, Array]:
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value for name, value in values.items() if value is not None and not isinstance(value, dict)}
