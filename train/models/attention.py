"""Attention behind one function. Shapes: B rows, T queries, S keys, N query heads, K key-value heads, H head width.

G = N / K query heads share a key-value head.

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
from jax import lax

from train.models.kernels import choose_kernel, cudnn_attention, splash_attention
from train.models.sharding import axis_size, constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """The keys that each query attends to.

    Attributes:
      full: [B, 1, T, S] bool, in full layers.
      sliding: [B, 1, T, S] bool, in sliding layers; None if the model has none.
      segments: [B, S] int32 for whole sequences, whose queries are the last T tokens: a token attends to tokens of its
        number up to itself, 0 is padding. None while decoding, and if no kernel is wanted.
      window: number of tokens that a sliding layer attends to.
      by_segments: whether `segments` tell the keys. They do not where completions of a segment share its prompt.
    """

    full: jax.Array
    sliding: jax.Array | None = None
    segments: jax.Array | None = None
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    by_segments: bool = dataclasses.field(default=True, metadata={"static": True})

    def for_layer(self, sliding: bool | jax.Array) -> jax.Array:
        """Selects the mask [B, 1, T, S] of a sliding or a full layer; `sliding` may be traced."""
        if sliding is False:
            return self.full
        assert self.sliding is not None
        return self.sliding if sliding is True else jnp.where(sliding, self.sliding, self.full)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedPromptMask:
    """The attention masks of packed rows.

    Attributes:
      prompt: R rows of P queries and P keys.
      completion: B rows of C queries and P + C keys.
    """

    prompt: AttentionMask
    completion: AttentionMask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The places of padded rows in packed rows. A packed row has runs `[prompt | completion | ... | completion]`.

    Attributes:
      tokens: [R, W] int32, the padded token in each slot, `row * T + column`; -1: no token.
      prompts: [B] int32, the padded row from which the prompt of each completion was taken; itself if it shares none.
      starts: [B, 2] int32, the slots `packed row * W + column` of the last token of the prompt and of the first of the
        completion; any slot for an empty completion.
      shared: whether completions share prompts. Splash attention cannot express that.
    """

    tokens: jax.Array
    prompts: jax.Array
    starts: jax.Array
    shared: bool = dataclasses.field(default=True, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How scores are computed.

    Attributes:
      sliding: whether this is a sliding layer, also as a traced scalar.
      scale: factor of the scores; None: `H ** -0.5`.
      softcap: scores z become `softcap * tanh(z / softcap)`; None: unchanged.
    """

    sliding: bool | jax.Array = False
    scale: float | None = None
    softcap: float | None = None


def token_ranks(token_mask: jax.Array) -> jax.Array:
    """Counts the real tokens of the row before each one, [B, T] int32; its position in a row of one sequence."""
    return jnp.maximum(jnp.cumsum(token_mask, axis=-1, dtype=jnp.int32) - 1, 0)


def token_positions(token_mask: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Computes the position of every real token within its segment, [B, T] int32; padding is not counted.

    Args:
      token_mask: [B, T] bool, True at real tokens.
      segment_ids: [B, T] int32, one run of equal numbers per sequence; None: a row is one sequence.
    """
    ranks = token_ranks(token_mask)
    if segment_ids is None:
        return ranks
    columns = jnp.arange(token_mask.shape[-1])
    # Column of the last real token before each one; column 0 for the first real token.
    last = lax.cummax(jnp.where(token_mask, columns, 0), axis=1)
    last = jnp.pad(last, ((0, 0), (1, 0)))[:, :-1]
    begins = token_mask & (segment_ids != jnp.take_along_axis(segment_ids, last, axis=1))
    return ranks - lax.cummax(jnp.where(begins, ranks, 0), axis=1)


def causal_mask(
    token_mask: jax.Array, segment_ids: jax.Array | None, window: int | None, *, first: int = 0
) -> AttentionMask:
    """Builds the mask of whole sequences: real tokens of the same segment, up to the query; padding attends to nothing.

    Args:
      token_mask: [B, S] bool, True at real tokens.
      segment_ids: [B, S] int32, any numbers >= 0; None: a row is one sequence.
      window: real tokens that a sliding layer attends to, the query included; None: the model has no such layer.
      first: column of the first query; there are T = S - first queries.
    """
    ids = jnp.zeros(token_mask.shape, jnp.int32) if segment_ids is None else segment_ids
    columns = jnp.arange(token_mask.shape[-1])
    full = (columns <= columns[first:, None])[None] & token_mask[:, None, :] & token_mask[:, first:, None]
    if segment_ids is not None:
        full = full & (ids[:, None, :] == ids[:, first:, None])
    sliding = None
    if window is not None:
        ranks = token_ranks(token_mask)
        sliding = (full & (ranks[:, first:, None] - ranks[:, None, :] < window))[:, None]
    return AttentionMask(full[:, None], sliding, jnp.where(token_mask, ids + 1, 0), window)


def cache_mask(
    token_mask: jax.Array,
    window: int | None,
    positions: jax.Array | None = None,
    key_positions: jax.Array | None = None,
) -> AttentionMask:
    """Builds the mask of one query per row over the columns of a KV cache.

    Args:
      token_mask: [B, S] bool, the columns that the query attends to, its own included.
      window: tokens of these that a sliding layer attends to; None: the model has no such layer.
      positions: [B] int32, positions of the queries; None: each query is the last real token.
      key_positions: [B, S] int32, positions of the columns; None: columns are in order.
    """
    sliding = None
    if window is not None:
        ranks = token_ranks(token_mask) if key_positions is None else key_positions
        query = ranks[:, -1] if positions is None or key_positions is None else positions
        sliding = (token_mask & (query[:, None] - ranks < window))[:, None, None, :]
    return AttentionMask(token_mask[:, None, None, :], sliding)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    options: AttentionOptions = AttentionOptions(),
) -> jax.Array:
    """Computes grouped-query attention, [B, T, N, H]; exactly 0, with zero gradient, for a query without keys.

    Whole sequences go through splash attention on TPU and through cuDNN on NVIDIA GPUs if these take the shape and
    the type (`choose_kernel`); everything else goes through XLA. Splash attention counts a window in columns, so
    padding inside a sequence would use it up; the trainer has none.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H] with N a multiple of K, finite also where masked.
      value: [B, S, K, H], finite also where masked.
      mask: the keys of each query.
      options: layer kind, scale and softcap.
    """
    seen = mask.for_layer(options.sliding)
    kernel = None if mask.segments is None else choose_kernel(query, key, options.softcap)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    if kernel == "splash" and mask.by_segments and mask.segments is not None:
        output = splash_attention(
            query,
            key,
            value,
            mask.segments,
            window=mask.window,
            sliding=options.sliding,
            scale=scale,
            softcap=options.softcap,
        )
        return jnp.where(mask.segments[:, -query.shape[1] :, None, None] > 0, output, 0)
    if kernel == "cudnn":
        output = cudnn_attention(query, key, value, seen, scale=scale)
    elif options.softcap is None and query.dtype != jnp.float64:  # its softmax is in float32 whatever the type
        output = jax.nn.dot_product_attention(query, key, value, mask=seen, scale=scale)
    else:
        output = _attend(query, key, value, seen, scale=scale, softcap=options.softcap)
    # Softmax over no key is uniform over the padding; the where keeps padding out of value and gradient.
    return jnp.where(jnp.any(seen, axis=-1)[:, 0, :, None, None], output, 0)


def shared_prompt_mask(token_mask: jax.Array, prompt: int, group: int, window: int | None) -> SharedPromptMask:
    """Builds the masks of packed rows.

    Args:
      token_mask: [B, P + C] bool of the rows before packing, True at real tokens.
      prompt: P.
      group: G.
      window: tokens that a sliding layer attends to; None: the model has no such layer.
    """
    return SharedPromptMask(
        causal_mask(token_mask[::group, :prompt], None, window),
        causal_mask(token_mask, None, window, first=prompt),
    )


def pack(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """Packs [B, P + C, ...] to [R, L, ...], with the prompt of the first row of each group."""
    rows = x.reshape(-1, group, *x.shape[1:])
    completions = rows[:, :, prompt:].reshape(len(rows), -1, *x.shape[2:])
    return jnp.concatenate([rows[:, 0, :prompt], completions], axis=1)


def unpack(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """Unpacks [R, L, ...] to [B, P + C, ...]; every row of a group gets the values of its prompt."""
    return jnp.concatenate([_repeat_rows(x[:, :prompt], group), _completions(x, prompt, group)], axis=1)


def attend_shared(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: SharedPromptMask, options: AttentionOptions
) -> jax.Array:
    """Computes `attend` of packed rows: [R, L, N, H] from queries [R, L, N, H], keys and values [R, L, K, H]."""
    rows, prompt, group = len(query), mask.prompt.full.shape[-1], len(mask.completion.full) // len(query)
    first = attend(query[:, :prompt], key[:, :prompt], value[:, :prompt], mask.prompt, options)
    queries, keys, values = _completions(query, prompt, group), unpack(key, prompt, group), unpack(value, prompt, group)
    later = attend(queries, keys, values, mask.completion, options)
    return jnp.concatenate([first, later.reshape(rows, -1, *later.shape[2:])], axis=1)


def pack_rows(x: jax.Array, packed: PackedRows) -> jax.Array:
    """Packs values of tokens, [B, T] to [R, W]; 0 or False in slots without a token."""
    parts = axis_size("rows")
    slots = packed.tokens.reshape(parts, -1)
    values = _take(x.reshape(parts, -1), slots)
    return constrain(jnp.where(slots >= 0, values, 0).astype(x.dtype).reshape(packed.tokens.shape), "rows", None)


def packed_positions(token_mask: jax.Array, packed: PackedRows) -> jax.Array:
    """Computes the positions [R, W] of tokens in their sequences, prompts included."""
    return pack_rows(token_positions(token_mask), packed)


def packed_mask(token_mask: jax.Array, packed: PackedRows, prompt: int, window: int | None) -> AttentionMask:
    """Builds the attention mask of packed rows.

    A token attends to the tokens up to itself of its own completion and of its prompt.

    Args:
      token_mask: [B, T] bool of the padded rows, True at real tokens.
      packed: the packed rows.
      prompt: P.
      window: tokens that a sliding layer attends to; None: the model has no such layer.
    """
    length, width = token_mask.shape[-1], packed.tokens.shape[-1]
    rows, real = packed.tokens // length, pack_rows(token_mask, packed)
    in_prompt = packed.tokens % length < prompt
    parts = axis_size("rows")
    prompts = _take(packed.prompts.reshape(parts, -1), rows.reshape(parts, -1)).reshape(rows.shape)
    columns = jnp.arange(width)
    full = (columns <= columns[:, None]) & real[:, :, None] & real[:, None, :]
    full &= prompts[:, :, None] == prompts[:, None, :]
    full &= in_prompt[:, None, :] | (rows[:, :, None] == rows[:, None, :])
    sliding = None
    if window is not None:
        positions = packed_positions(token_mask, packed)
        sliding = (full & (positions[:, :, None] - positions[:, None, :] < window))[:, None]
    segments = jnp.where(real, prompts + 1, 0)
    return AttentionMask(full[:, None], sliding, segments, window, by_segments=not packed.shared)


def unpack_states(states: jax.Array, token_mask: jax.Array, packed: PackedRows, prompt: int) -> jax.Array:
    """Unpacks hidden states, [R, W, D] to [B, T, D], for the tokens that predict one of a completion; 0 elsewhere.

    Args:
      states: [R, W, D].
      token_mask: [B, T] bool, True at real tokens.
      packed: the packed rows.
      prompt: P.
    """
    parts, length, width = axis_size("rows"), token_mask.shape[1], states.shape[-1]
    real = token_mask[:, prompt:].reshape(parts, -1, length - prompt)
    columns = jnp.arange(length - prompt)
    starts = packed.starts.reshape(parts, -1, 2)
    slots = jnp.where(columns == 0, starts[..., :1], starts[..., 1:] + columns - 1)
    # The token that the state in each slot predicts, among those of the completions.
    following = packed.tokens % length + 1 - prompt
    predicted = jnp.where(
        (packed.tokens >= 0) & (following >= 0) & (following < length - prompt),
        packed.tokens // length * (length - prompt) + following,
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


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, *, scale: float, softcap: float | None
) -> jax.Array:
    rows, length, heads, head_dim = query.shape
    grouped = query.reshape(rows, length, key.shape[2], -1, head_dim)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=wide) * scale
    capped = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    lowest = jnp.finfo(wide).min / 2
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], capped, lowest), axis=-1).astype(query.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, value).reshape(rows, length, heads, head_dim)


def _completions(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """Splits the completions off packed rows: [R, L, ...] to [B, C, ...]."""
    return x[:, prompt:].reshape(len(x) * group, -1, *x.shape[2:])


def _repeat_rows(x: jax.Array, group: int) -> jax.Array:
    """Repeats rows, [R, ...] to [B, ...]; the gradient is a sum over an axis of its own, not a scatter."""
    return jnp.broadcast_to(x[:, None], (len(x), group, *x.shape[1:])).reshape(-1, *x.shape[1:])


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Takes entries of each part, [S, N, ...] and [S, M] to [S, M, ...]; an index below 0 takes the first."""
    return jax.vmap(lambda x, index: x.at[jnp.maximum(index, 0)].get(mode="promise_in_bounds"))(x, index)
