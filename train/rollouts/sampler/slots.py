"""The queue of prompts, and the slots of continuous batching with their KV cache."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax

from train.models import GroupCache, KeyValues, SlotCache
from train.models.sharding import axis_size, constrain
from train.rollouts.sampler.draw import Draws

KVCache: TypeAlias = KeyValues | list[SlotCache] | list[GroupCache]
# Maps an array and its axis of N prompts to the same array with B rows, each with a copy of its prompt's entry.
PromptsToRows: TypeAlias = Callable[[jax.Array, int], jax.Array]


def fill_slots(
    queue: "PromptQueue", to_rows: PromptsToRows, group: int, *, kept_tokens: int | None, unroll: bool
) -> "Slots":
    """Makes a slot for every row, before its first draw.

    Args:
      queue: the prompts and rows.
      to_rows: copies prompts to their rows.
      group: the number of rows of each prompt; 1 with any other assignment.
      kept_tokens: the length of the recorded lists of kept tokens; None: not recorded.
      unroll: whether the cache is a list of layers instead of one stack.
    """
    # On a mesh a prompt may be on another device than its rows.
    if group == 1 or not unroll or axis_size("rows") > 1:
        prompts = jax.tree.map(lambda x: to_rows(x, 1), queue.cache)
        cache = _extend_cache(prompts, queue.max_new_tokens, unroll=unroll)
    else:
        cache = [GroupCache.of(layer, group, queue.max_new_tokens) for layer in _layers(queue.cache)]
    rows = len(queue.order)
    draws = queue.empty_draws(rows, kept_tokens)
    return _make_slots(queue, jnp.arange(rows), queue.limits > 0, to_rows, draws=draws, cache=cache)


def empty_slots(queue: "PromptQueue", count: int, *, kept_tokens: int | None, unroll: bool) -> "Slots":
    """Makes `count` slots without rows, to be filled from the queue, and empty outputs."""

    def zeros(x: jax.Array, axis: int) -> jax.Array:
        return jnp.zeros((*x.shape[:axis], count, *x.shape[axis + 1 :]), x.dtype)

    rows = len(queue.order)
    prompts = jax.tree.map(lambda x: zeros(x, 1), queue.cache)
    cache = _extend_cache(prompts, queue.max_new_tokens, unroll=unroll)
    draws = queue.empty_draws(count, kept_tokens)
    slots = _make_slots(queue, jnp.full(count, rows), jnp.zeros(count, bool), zeros, draws=draws, cache=cache)
    outputs = Outputs(
        draws=queue.empty_draws(rows, kept_tokens),
        lengths=jnp.zeros(rows, jnp.int32),
        finished=jnp.zeros(rows, bool),
    )
    return dataclasses.replace(slots, outputs=outputs, taken=jnp.int32(0))


def _make_slots(
    queue: "PromptQueue",
    row: jax.Array,
    active: jax.Array,
    to_slots: PromptsToRows,
    *,
    draws: Draws,
    cache: KVCache,
) -> "Slots":
    """Makes slots before their first draw.

    Args:
      queue: the prompts and rows.
      row: [S] int32, the row in each slot.
      active: [S] bool.
      to_slots: copies prompts to slots.
      draws: empty draws of all slots.
      cache: the KV cache, with columns for the completions.
    """
    zero = jnp.zeros(len(row), jnp.int32)
    return Slots(
        step=jnp.int32(0),
        row=row.astype(jnp.int32),
        first_step=zero,
        length=zero,
        active=active,
        finished=zero > 0,
        stop_state=zero,
        draws=draws,
        token_mask=jnp.pad(to_slots(queue.prompt_mask, 0), ((0, 0), (0, queue.max_new_tokens))),
        hidden=constrain(to_slots(queue.hidden, 0), "rows", None),
        cache=cache,
    )


def _layers(stacked: KeyValues) -> list[KeyValues]:
    """Lists the keys and values of each layer."""
    return [jax.tree.map(lambda x, layer=layer: x[layer], stacked) for layer in range(len(stacked.key))]


def _extend_cache(prompts: KeyValues, max_new_tokens: int, *, unroll: bool) -> KVCache:
    """Appends `max_new_tokens` columns of zeros to keys and values [L, S, P, K, H], one cache per layer if `unroll`."""

    def pad(x: jax.Array, axis: int, *axes: str | None) -> jax.Array:
        return constrain(jnp.pad(x, [(0, max_new_tokens if axis == n else 0) for n in range(x.ndim)]), *axes)

    if not unroll:
        return jax.tree.map(lambda x: pad(x, 2, "layers", "rows", None, "kv_heads", None), prompts)
    axes = ("rows", "kv_heads", None, None)
    layers = [SlotCache.of(layer) for layer in _layers(prompts)]
    return [SlotCache(pad(layer.key, 3, *axes), pad(layer.value, 2, *axes)) for layer in layers]


def _write_prompt(cache: KVCache, slot: jax.Array, prompts: KeyValues, prompt: jax.Array) -> KVCache:
    """Copies the columns of one prompt into one slot; later columns are masked until they are written."""
    # A gather instead of a slice: if prompts are split over devices, only this prompt is sent.
    new = jax.tree.map(lambda x: jnp.take(x, prompt[None], axis=1, mode="clip"), prompts)
    if isinstance(cache, KeyValues):
        return jax.tree.map(lambda old, x: lax.dynamic_update_slice(old, x, (0, slot, 0, 0, 0)), cache, new)
    # A `GroupCache` never gets here: all its rows are in slots from the start.
    layers = cast(list[SlotCache], cache)
    return [old.write(layer, 0, slot) for old, layer in zip(layers, _layers(new), strict=True)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptQueue:
    """N prefilled prompts and the B rows that complete them; constant in the decode loop.

    Attributes:
      order: [B] int32, the rows in the order in which they enter slots; rows that draw nothing come last.
      count: [] int32, the number of rows that draw a token.
      prompt_ids: [B] int32, the prompt of each row.
      lengths: [B] int32, the prompt length of each row.
      limits: [B] int32, the max new tokens of each row; 0 without a prompt.
      uniforms: [B, C, 2], the random numbers of each token.
      prompt_mask: [N, P] bool.
      hidden: [N, D], the hidden states of the prompts' last tokens.
      cache: the keys and values of the prompts, [L, N, P, K, H].
    """

    order: jax.Array
    count: jax.Array
    prompt_ids: jax.Array
    lengths: jax.Array
    limits: jax.Array
    uniforms: jax.Array
    prompt_mask: jax.Array
    hidden: jax.Array
    cache: KeyValues

    @property
    def max_new_tokens(self) -> int:
        """C."""
        return self.uniforms.shape[1]

    def empty_draws(self, rows: int, kept_tokens: int | None) -> Draws:
        """Makes empty draws [rows, C]."""
        return Draws.zeros((rows, self.max_new_tokens), self.uniforms.dtype, kept_tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Completions in the order of the rows.

    Attributes:
      draws: [B, C], arbitrary after the end of a completion.
      lengths: [B] int32, the number of tokens of each completion.
      finished: [B] bool, the rows that EOS or a stop string ended.
    """

    draws: Draws
    lengths: jax.Array
    finished: jax.Array

    def write(self, rows: jax.Array, new: "Outputs") -> "Outputs":
        """Writes `new` at `rows`, a scalar or [S]; a row beyond B is dropped."""
        return jax.tree.map(lambda old, x: old.at[rows].set(x, mode="drop"), self, new)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """S rows that are decoded at once, with their KV cache; P columns of prompt and C of completion.

    All slots write the same column in a step, `P + step % C`. A row that starts in step b has its completion from
    column `P + b % C` on, and wraps around at the end. Attention takes the mask and the position of each column, so the
    order of columns does not matter.

    Attributes:
      step: [] int32, the number of draws so far.
      row: [S] int32, the row of the queue in each slot; B in a slot that has had none.
      first_step: [S] int32, `step` at the first token of the row.
      length: [S] int32, the number of tokens of the completion so far.
      active: [S] bool, the slots that draw another token.
      finished: [S] bool, the rows that EOS or a stop string ended.
      stop_state: [S] int32, the states of the search for stop strings.
      draws: [S, C], the columns of completions.
      token_mask: [S, P + C] bool, the columns that are attended.
      hidden: [S, D], the hidden states that predict the next token.
      cache: keys and values.
      outputs: the completions that have left their slots; None with a slot for every row.
      taken: [] int32, the number of rows taken from the queue; None with a slot for every row.
    """

    step: jax.Array
    row: jax.Array
    first_step: jax.Array
    length: jax.Array
    active: jax.Array
    finished: jax.Array
    stop_state: jax.Array
    draws: Draws
    token_mask: jax.Array
    hidden: jax.Array
    cache: KVCache
    outputs: Outputs | None = None
    taken: jax.Array | None = None

    @property
    def max_new_tokens(self) -> int:
        """C."""
        return self.draws.tokens.shape[1]

    @property
    def prompt_length(self) -> int:
        """P."""
        return self.token_mask.shape[1] - self.max_new_tokens

    def last_draw(self) -> jax.Array:
        """Returns the index of the latest draw in `draws`."""
        return (self.step - 1) % self.max_new_tokens

    def key_positions(self, prompt_lengths: jax.Array) -> jax.Array:
        """Computes the position of every column in its row, [S, P + C]; arbitrary where masked.

        Args:
          prompt_lengths: [S] int32, the number of real tokens of each prompt.
        """
        column = jnp.arange(self.prompt_length + self.max_new_tokens)
        in_prompt = column - self.prompt_length + prompt_lengths[:, None]
        draw = (column - self.prompt_length - self.first_step[:, None]) % self.max_new_tokens
        return jnp.where(column < self.prompt_length, in_prompt, prompt_lengths[:, None] + draw)

    def append(self, new: Draws, stop_state: jax.Array, *, ended: jax.Array) -> "Slots":
        """Appends one token to every active slot; other slots stay unchanged.

        Args:
          new: [S], one draw for each slot.
          stop_state: [S] int32, the search for stop strings after the token.
          ended: [S] bool, the slots whose token is EOS or completes a stop string.
        """
        index, active = self.step % self.max_new_tokens, self.active

        def write(array: jax.Array, values: jax.Array, column: jax.Array) -> jax.Array:
            # An inactive slot may still contain a completion: none of its columns is overwritten.
            old = lax.dynamic_slice_in_dim(array, column, 1, axis=1)
            is_active = active.reshape(-1, *[1] * (old.ndim - 1))
            new = jnp.where(is_active, values[:, None].astype(array.dtype), old)
            return lax.dynamic_update_slice_in_dim(array, new, column, axis=1)

        return dataclasses.replace(
            self,
            step=self.step + 1,
            length=self.length + active,
            active=active & ~ended,
            finished=self.finished | (active & ended),
            stop_state=stop_state,
            draws=jax.tree.map(lambda array, values: write(array, values, index), self.draws, new),
            token_mask=write(self.token_mask, active, self.prompt_length + index),
        )

    def write_outputs(self) -> Outputs:
        """Writes the completions of all slots to `outputs`."""
        assert self.outputs is not None
        column = (self.first_step[:, None] + jnp.arange(self.max_new_tokens)) % self.max_new_tokens

        def unwrap(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, column.reshape(*column.shape, *[1] * (x.ndim - 2)), axis=1)

        return self.outputs.write(self.row, Outputs(jax.tree.map(unwrap, self.draws), self.length, self.finished))

    def evict(self, slot: jax.Array) -> Outputs:
        """Writes the completion of one slot to `outputs`."""
        assert self.outputs is not None
        selected = jnp.arange(len(self.row)) == slot

        def select(x: jax.Array) -> jax.Array:
            # A sum instead of an index: if slots are split over devices, only this slot is sent.
            mask = selected.reshape(-1, *[1] * (x.ndim - 1))
            return jnp.sum(jnp.where(mask, x, 0), axis=0, dtype=x.dtype)

        def unwrap(x: jax.Array) -> jax.Array:
            return jnp.roll(select(x), -select(self.first_step) % self.max_new_tokens, axis=0)

        completion = Outputs(
            draws=jax.tree.map(unwrap, self.draws),
            lengths=select(self.length),
            finished=jnp.any(selected & self.finished),
        )
        return self.outputs.write(select(self.row), completion)

    def load(self, slot: jax.Array, queue: PromptQueue, row: jax.Array) -> "Slots":
        """Copies the prompt of a row, with its keys and values, into a slot."""
        prompt = queue.prompt_ids[row]
        changes = {
            "row": row,
            "first_step": self.step,
            "length": 0,
            "active": True,
            "finished": False,
            "stop_state": 0,
            "token_mask": jnp.pad(queue.prompt_mask[prompt], (0, self.max_new_tokens)),
            "hidden": queue.hidden[prompt],
        }
        new = {name: getattr(self, name).at[slot].set(value) for name, value in changes.items()}
        return dataclasses.replace(self, **new, cache=_write_prompt(self.cache, slot, queue.cache, prompt))
