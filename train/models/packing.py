"""Rows that share prompts, and rows without padding.

Completions that share a prompt go through the layers as packed rows, `[prompt | completion | ... | completion]`, with
the prompt once; completions do not attend to each other. B rows of P + C tokens with G completions per prompt become
R = B / G packed rows of L = P + G C tokens.

`PackedRows` are others: the sequences of several padded rows in one row of W slots, without their padding. B padded
rows and R packed rows are split over the devices in S parts, and a sequence stays in its part: every number of a row,
token or slot counts within the part.
"""

import dataclasses

import jax
import jax.numpy as jnp

from train.models.attention.spans import Spans
from train.models.sharding import axis_size, constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The places of padded rows in packed rows. A packed row has runs `[prompt | completion | ... | completion]`.

    Attributes:
      tokens: [R, W] int32, the padded token in each slot, `row * T + column`; -1: no token.
      prompts: [B] int32, the padded row from which the prompt of each completion was taken; itself if it shares none.
      starts: [B, 2] int32, the slots `packed row * W + column` of the last token of the prompt and of the first of the
        completion; any slot for an empty completion.
    """

    tokens: jax.Array
    prompts: jax.Array
    starts: jax.Array


def token_positions(token_mask: jax.Array) -> jax.Array:
    """Counts the real tokens of the row before each one, [B, T] int32."""
    return jnp.maximum(jnp.cumsum(token_mask, axis=-1, dtype=jnp.int32) - 1, 0)


def row_spans(token_mask: jax.Array, window: int | None) -> Spans:
    """Builds the spans of rows of one sequence each, whose padding may be anywhere.

    Args:
      token_mask: [B, T] bool, True at real tokens.
      window: real tokens that a sliding layer attends to, the query included; None: the model has no such layer.
    """
    last = jnp.max(_slots_after(token_mask), axis=-1, keepdims=True)
    return _prompt_spans(token_mask, last, True, size=token_mask.shape[1], prompt=0, completion=0, window=window)


def left_aligned(token_mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the order [B, T] int32 of the columns of each row that puts its real tokens first, and its inverse."""
    order = jnp.argsort(~token_mask, axis=-1, stable=True).astype(jnp.int32)
    return order, jnp.argsort(order, axis=-1).astype(jnp.int32)


def left_aligned_spans(token_mask: jax.Array, window: int | None) -> Spans:
    """Builds `row_spans` of rows whose real tokens come first: their lengths say all; a row without any has one."""
    spans = row_spans(token_mask, window)
    return dataclasses.replace(spans, lengths=jnp.maximum(jnp.sum(token_mask, axis=-1, dtype=jnp.int32), 1))


@jax.custom_vjp
def reorder(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Takes the columns of [B, T, ...] in an order [B, T]; the gradient takes them in its inverse, no scatter."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1, mode="promise_in_bounds")


reorder.defvjp(
    lambda x, order, inverse: (reorder(x, order, inverse), (order, inverse)),
    lambda orders, cotangent: (reorder(cotangent, *orders[::-1]), None, None),
)


def group_spans(token_mask: jax.Array, prompt: int, group: int, window: int | None) -> Spans:
    """Builds the spans of prompts with their completions, [prompt | completion | ... | completion].

    Args:
      token_mask: [R, P + G C] bool, True at real tokens; padding may be anywhere.
      prompt: P.
      group: G.
      window: as in `row_spans`.
    """
    rows, width = token_mask.shape
    length = (width - prompt) // group
    after, in_prompt = _slots_after(token_mask), jnp.arange(width) < prompt
    ends = jnp.max(after[:, prompt:].reshape(rows, group, length), axis=-1)
    last = jnp.broadcast_to(jnp.max(after, axis=-1, keepdims=True), (rows, prompt))
    counts = jnp.sum(token_mask[:, prompt:].reshape(rows, group, length), axis=-1, dtype=jnp.int32)
    size = jnp.sum(token_mask[:, :prompt], axis=-1, keepdims=True, dtype=jnp.int32)
    before = jnp.repeat(size + jnp.cumsum(counts, axis=-1) - counts, length, axis=-1)
    spans = _prompt_spans(
        token_mask,
        jnp.concatenate([last, jnp.repeat(ends, length, axis=-1)], axis=-1),
        in_prompt,
        size=size,
        prompt=0,
        completion=jnp.pad(before, ((0, 0), (prompt, 0))),
        window=window,
    )
    return dataclasses.replace(spans, group=(prompt, length))


def _slots_after(real: jax.Array) -> jax.Array:
    """Returns slot + 1 of real tokens, 0 elsewhere, [R, W] int32."""
    return jnp.where(real, jnp.arange(1, real.shape[1] + 1, dtype=jnp.int32), 0)


def _prompt_spans(
    real: jax.Array,
    end: jax.Array,
    in_prompt: bool | jax.Array,
    *,
    size: int | jax.Array,
    prompt: int | jax.Array,
    completion: int | jax.Array,
    window: int | None,
) -> Spans:
    """Builds the spans of rows of prompts and completions. All arrays broadcast to the slots, [R, W].

    Args:
      real: the slots with a token.
      end: of these.
      in_prompt: whether a slot is in a prompt.
      size: real tokens of the prompt of each slot.
      prompt: real tokens of the row before the prompt of each slot.
      completion: real tokens of the row before the completion of each slot.
      window: as in `row_spans`.
    """
    slots, ranks = jnp.arange(real.shape[1], dtype=jnp.int32), token_positions(real)
    # The slots of the real tokens, in their order, then those of padding.
    order = jnp.argsort(~real, axis=-1, stable=True).astype(jnp.int32)
    depths = jnp.where(in_prompt, ranks - prompt, size + ranks - completion)

    def ancestors(depth: jax.Array) -> jax.Array:
        depth = jnp.maximum(depth, 0)
        rank = jnp.where(depth < size, prompt + depth, completion + depth - size)
        return jnp.where(real, jnp.take_along_axis(order, rank, axis=-1, mode="clip"), slots)

    return Spans(
        end=jnp.where(real, end, slots + 1),
        start=ancestors(jnp.zeros_like(depths)),
        window_start=None if window is None else ancestors(depths - (window - 1)),
        window=window,
    )


def pack(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """Packs [B, P + C, ...] to [R, L, ...], with the prompt of the first row of each group."""
    rows = x.reshape(-1, group, *x.shape[1:])
    completions = rows[:, :, prompt:].reshape(len(rows), -1, *x.shape[2:])
    return jnp.concatenate([rows[:, 0, :prompt], completions], axis=1)


def unpack(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """Unpacks [R, L, ...] to [B, P + C, ...]; every row of a group gets the values of its prompt."""
    return jnp.concatenate([_repeat_rows(x[:, :prompt], group), _completions(x, prompt, group)], axis=1)


def pack_rows(x: jax.Array, packed: PackedRows, fill: float = 0) -> jax.Array:
    """Packs values of tokens, [B, T, ...] to [R, W, ...], with `fill` in slots without a token."""
    parts = axis_size("rows")
    trailing = x.shape[2:]
    slots = packed.tokens.reshape(parts, -1)
    has_token = (slots >= 0).reshape(*slots.shape, *[1] * len(trailing))
    values = jnp.where(has_token, _take(x.reshape(parts, -1, *trailing), slots), fill).astype(x.dtype)
    return constrain(values.reshape(*packed.tokens.shape, *trailing), "rows", *[None] * (1 + len(trailing)))


def packed_counts(token_mask: jax.Array, packed: PackedRows, prompt: int) -> jax.Array:
    """Counts the padded rows that have the token of each slot, [R, W] int32: several share a prompt.

    Rows with an empty completion have no slots and do not count.
    """
    parts = axis_size("rows")
    length = token_mask.shape[1]
    completed = jnp.any(token_mask[:, prompt:], axis=-1).astype(jnp.int32).reshape(parts, -1)
    sharing = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, len(x)))(completed, packed.prompts.reshape(parts, -1))
    slots = packed.tokens.reshape(parts, -1)
    counts = jnp.where(slots % length < prompt, _take(sharing, slots // length), 1)
    return jnp.where(slots >= 0, counts, 0).reshape(packed.tokens.shape)


def packed_positions(token_mask: jax.Array, packed: PackedRows) -> jax.Array:
    """Computes the positions [R, W] of tokens in their sequences, prompts included."""
    return pack_rows(token_positions(token_mask), packed)


def packed_spans(token_mask: jax.Array, packed: PackedRows, prompt: int, window: int | None) -> Spans:
    """Builds the spans of packed rows: a token attends to its own completion and to its prompt, up to itself.

    Args:
      token_mask: [B, T] bool of the padded rows, True at real tokens.
      packed: the packed rows.
      prompt: P.
      window: tokens that a sliding layer attends to; None: the model has no such layer.
    """
    parts, length, width = axis_size("rows"), token_mask.shape[1], packed.tokens.shape[1]
    real, tokens = pack_rows(token_mask, packed), packed.tokens.reshape(parts, -1)
    starts = packed.starts.reshape(parts, -1, 2) % width
    lengths = jnp.max(_slots_after(token_mask[:, prompt:]), axis=-1).reshape(parts, -1)
    ends = jnp.where(lengths > 0, starts[..., 1] + lengths, 0)
    prompts = packed.prompts.reshape(parts, -1)
    lasts = jax.vmap(lambda x, ids: jax.ops.segment_max(x, ids, len(x)))(ends, prompts)

    def of_tokens(x: jax.Array) -> jax.Array:
        """Gives each slot the number of its padded row."""
        return _take(x, tokens // length).reshape(packed.tokens.shape)

    last_of_prompt, begins = of_tokens(starts[..., 0]), of_tokens(starts[..., 1])
    in_prompt = packed.tokens % length < prompt
    size = of_tokens(jnp.sum(token_mask[:, :prompt], axis=-1, dtype=jnp.int32).reshape(parts, -1))
    counts = jnp.cumsum(real, axis=-1, dtype=jnp.int32)
    return _prompt_spans(
        real,
        jnp.where(in_prompt, jnp.maximum(of_tokens(lasts), last_of_prompt + 1), of_tokens(ends)),
        in_prompt,
        size=size,
        prompt=jnp.take_along_axis(counts, last_of_prompt, axis=-1) - size,
        completion=jnp.take_along_axis(counts - real, begins, axis=-1),
        window=window,
    )


def unpack_states(states: jax.Array, token_mask: jax.Array, packed: PackedRows, prompt: int) -> jax.Array:
    """Unpacks hidden states, [R, W, D] to [B, T, D], for the tokens that predict one of a completion; 0 elsewhere.

    Args:
      states: [R, W, D].
      token_mask: [B, T] bool, True at real tokens.
      packed: the packed rows.
      prompt: P.
    """
    parts = axis_size("rows")
    length = token_mask.shape[1]
    width = states.shape[-1]
    real = token_mask[:, prompt:].reshape(parts, -1, length - prompt)
    columns = jnp.arange(length - prompt)
    starts = packed.starts.reshape(parts, -1, 2)
    slots = jnp.where(columns == 0, starts[..., :1], starts[..., 1:] + columns - 1)
    # The token that the state in each slot predicts, among those of the completions.
    next_index = packed.tokens % length + 1 - prompt
    predicted = jnp.where(
        (packed.tokens >= 0) & (next_index >= 0) & (next_index < length - prompt),
        packed.tokens // length * (length - prompt) + next_index,
        -1,
    )
    before = _unpack(
        states.reshape(parts, -1, width), real, slots, predicted.reshape(parts, -1), packed.prompts.reshape(parts, -1)
    )
    before = before.reshape(len(token_mask), -1, width)
    return constrain(jnp.pad(before, ((0, 0), (prompt - 1, 1), (0, 0))), "rows", None, None)


@jax.custom_vjp
def _unpack(
    states: jax.Array, real: jax.Array, slots: jax.Array, predicted: jax.Array, prompts: jax.Array
) -> jax.Array:
    """Gathers the hidden states before the tokens of completions, [S, R W, D] to [S, B, C, D].

    The gradient is a gather too: a scatter takes its indices one after another on a CPU, and adds in no fixed order on
    a GPU.

    Args:
      states: [S, R W, D].
      real: [S, B, C] bool, True at real tokens.
      slots: [S, B, C] int32, the slot of the state before each token.
      predicted: [S, R W] int32, the token `row * C + column` that each state predicts; for that of a prompt the first
        of the row it was taken from; -1: none.
      prompts: [S, B] int32, that row.
    """
    taken = _take(states, slots.reshape(len(slots), -1)).reshape(*slots.shape, -1)
    return jnp.where(real[..., None], taken, 0)


def _unpack_forward(
    states: jax.Array, real: jax.Array, slots: jax.Array, predicted: jax.Array, prompts: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _unpack(states, real, slots, predicted, prompts), (real, predicted, prompts)


def _unpack_backward(kept: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
    real, predicted, prompts = kept
    parts, rows, columns = real.shape
    cotangent = jnp.where(real[..., None], cotangent, 0)
    # The last state of a prompt predicts the first token of each of its completions.
    wide = cotangent[:, :, 0].astype(jnp.promote_types(cotangent.dtype, jnp.float32))
    summed = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, rows))(wide, prompts).astype(cotangent.dtype)
    is_first = (jnp.arange(columns) == 0)[:, None]
    per_token = jnp.where(is_first, summed[:, :, None], cotangent).reshape(parts, rows * columns, -1)
    return jnp.where(predicted[..., None] >= 0, _take(per_token, predicted), 0), None, None, None, None


_unpack.defvjp(_unpack_forward, _unpack_backward)


def _completions(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """Splits the completions off packed rows: [R, L, ...] to [B, C, ...]."""
    return x[:, prompt:].reshape(len(x) * group, -1, *x.shape[2:])


def _repeat_rows(x: jax.Array, group: int) -> jax.Array:
    """Repeats rows, [R, ...] to [B, ...]; the gradient is a sum over an axis of its own, not a scatter."""
    return jnp.broadcast_to(x[:, None], (len(x), group, *x.shape[1:])).reshape(-1, *x.shape[1:])


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Takes entries of each part, [S, N, ...] and [S, M] to [S, M, ...]; an index below 0 takes the first."""
    return jax.vmap(lambda x, index: x.at[jnp.maximum(index, 0)].get(mode="promise_in_bounds"))(x, index)
