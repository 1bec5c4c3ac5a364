"""Sampling in one compiled program: the prompts at once, then one cached step per token until every row is done."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

import kljax
from train.models import Decoder, KeyValues
from train.policy import head, variables
from train.sharding import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samples:
    """Prompts with their completions, [B, P + C]; `finished` [B] says which rows ended with EOS."""

    tokens: jax.Array
    token_mask: jax.Array
    completion_mask: jax.Array
    log_probs: jax.Array
    finished: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """Samples so far, and the number drawn; `hidden` [B, D] predicts the next token."""

    count: jax.Array
    samples: Samples
    hidden: jax.Array
    cache: KeyValues


def _choose(logits: jax.Array, row_keys: jax.Array, count: jax.Array, greedy: bool) -> jax.Array:
    """Next tokens [B] int32: the argmax, or a draw whose key depends on the row and the position alone."""
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, count)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _prefill(model: Decoder, params: dict, prompts: jax.Array, prompt_mask: jax.Array, room: int) -> _State:
    """The state before the first draw, with `room` empty columns after the prompts."""
    rows = prompts.shape[0]

    def widen(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, room if i == axis else 0) for i in range(x.ndim)])

    hidden, new = model.apply(params, prompts, prompt_mask, method=Decoder.prefill)
    cache = jax.tree.map(lambda x: constrain(widen(x, 2), "layers", "rows", None, "kv_heads", None), new)
    tokens = widen(prompts.astype(jnp.int32), 1)
    samples = Samples(
        tokens=tokens,
        token_mask=widen(prompt_mask, 1),
        completion_mask=jnp.zeros(tokens.shape, bool),
        log_probs=jnp.zeros(tokens.shape, jnp.float32),
        finished=jnp.zeros(rows, bool),
    )
    return _State(jnp.int32(0), samples, hidden[:, -1], cache)


def _append(
    old: Samples, column: jax.Array, token: jax.Array, log_prob: jax.Array, live: jax.Array, *, ended: jax.Array
) -> Samples:
    """`old` with one more column; rows that are not live get a column that is in no mask."""

    def put(into: jax.Array, values: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(into, values[:, None].astype(into.dtype), column, axis=1)

    return Samples(
        tokens=put(old.tokens, token),
        token_mask=put(old.token_mask, live),
        completion_mask=put(old.completion_mask, live),
        log_probs=put(old.log_probs, log_prob),
        finished=old.finished | ended,
    )


def sample(
    model: Decoder,
    policy: kljax.Policy,
    prompts: jax.Array,
    prompt_mask: jax.Array,
    *,
    key: jax.Array,
    max_new_tokens: int,
    temperature: float | jax.Array,
    eos_id: int | jax.Array,
    greedy: bool = False,
    row_ids: jax.Array | None = None,
) -> Samples:
    """Complete left-padded prompts; jittable with `model`, `max_new_tokens` and `greedy` static.

    Args:
      prompts: [B, P] int32, left-padded; prompt_mask: [B, P] bool. A row without a prompt is padding and draws nothing.
      key: token n of row r is drawn with `fold_in(fold_in(key, r), n)`, whatever else is in the batch.
      max_new_tokens: C, the most tokens drawn per row.
      temperature: divides the logits, in the draw and in `log_probs`; `greedy` takes the argmax instead.
      eos_id: ends a row; it belongs to the completion.
      row_ids: [B] int32, the rows' numbers for the keys (0 .. B-1 unless given), so that a split or permuted batch
        draws the same tokens.

    Returns:
      `Samples`; columns after a row's end hold `eos_id` and are in no mask, `log_probs` is 0 outside completions.
    """
    rows, width = prompts.shape
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, expected at least 1")
    params, weights = variables(model, policy), head(model, policy.params)
    ids = jnp.arange(rows) if row_ids is None else row_ids
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
    lengths = jnp.sum(prompt_mask, axis=1, dtype=jnp.int32)

    def alive(state: _State) -> jax.Array:
        return (lengths > 0) & ~state.samples.finished

    def draw(state: _State) -> _State:
        old, column = state.samples, width + state.count
        live = alive(state)
        wide = jnp.promote_types(state.hidden.dtype, jnp.float32)
        logits = (state.hidden.astype(wide) @ weights.astype(wide)) / temperature
        token = jnp.where(live, _choose(logits, row_keys, state.count, greedy), eos_id).astype(jnp.int32)
        scored = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]
        samples = _append(old, column, token, jnp.where(live, scored, 0), live, ended=live & (token == eos_id))
        return dataclasses.replace(state, count=state.count + 1, samples=samples)

    def advance(state: _State) -> _State:
        column = width + state.count - 1
        token = lax.dynamic_index_in_dim(state.samples.tokens, column, axis=1, keepdims=False)
        hidden, cache = model.apply(
            params,
            token,
            lengths + state.count - 1,
            state.cache,
            state.samples.token_mask,
            column,
            method=Decoder.decode,
        )
        return draw(dataclasses.replace(state, hidden=hidden, cache=cache))

    def unfinished(state: _State) -> jax.Array:
        return (state.count < max_new_tokens) & jnp.any(alive(state))

    first = draw(_prefill(model, params, prompts, prompt_mask, max_new_tokens))
    last = lax.while_loop(unfinished, advance, first)
    blank = (jnp.arange(width + max_new_tokens) >= width) & ~last.samples.completion_mask
    return dataclasses.replace(last.samples, tokens=jnp.where(blank, eos_id, last.samples.tokens))
