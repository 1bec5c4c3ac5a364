"""The queue of prompts, and the slots of continuous batching with their KV cache."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from train.models.cache import DecoderState, PromptState
from train.models.sharding import axis_size, constrain
from train.sequences.token_fields import TokenFields

# Maps an array and its axis of N prompts to the same array with B rows, each with a copy of its prompt's entry.
PromptsToRows: TypeAlias = Callable[[jax.Array, int], jax.Array]


def fill_slots(
    queue: "PromptQueue", to_rows: PromptsToRows, group: int, *, window: int, draws: TokenFields, unroll: bool
) -> "Slots":
    """Makes a slot for every row, before its first draw.

    Args:
      queue: the prompts and rows.
      to_rows: copies prompts to their rows.
      group: the number of rows of each prompt.
      window: the number of columns for completions.
      draws: the shapes and dtypes of the draw of one row, [1, ...].
      unroll: whether each layer has a state of its own.
    """
    rows = len(queue.order)
    # On a mesh a prompt may be on another device than its rows.
    shared = group > 1 and axis_size("rows") == 1
    states = queue.states if shared else jax.tree.map(lambda x: to_rows(x, 1), queue.states)
    state = DecoderState.of(states, group if shared else 1, window, unroll=unroll)
    empty = queue.empty_draws(rows, draws)
    return _make_slots(queue, jnp.arange(rows), queue.limits > 0, to_rows, draws=empty, state=state)


def empty_slots(queue: "PromptQueue", count: int, *, window: int, draws: TokenFields, unroll: bool) -> "Slots":
    """Makes `count` slots without rows, to be filled from the queue, and empty outputs."""

    def zeros(x: jax.Array, axis: int) -> jax.Array:
        return jnp.zeros((*x.shape[:axis], count, *x.shape[axis + 1 :]), x.dtype)

    rows = len(queue.order)
    state = DecoderState.of(jax.tree.map(lambda x: zeros(x, 1), queue.states), 1, window, unroll=unroll)
    empty = queue.empty_draws(count, draws)
    slots = _make_slots(queue, jnp.full(count, rows), jnp.zeros(count, bool), zeros, draws=empty, state=state)
    outputs = Outputs(
        draws=queue.empty_draws(rows, draws),
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
    draws: TokenFields,
    state: DecoderState,
) -> "Slots":
    """Makes slots before their first draw.

    Args:
      queue: the prompts and rows.
      row: [S] int32, the row in each slot.
      active: [S] bool.
      to_slots: copies prompts to slots.
      draws: empty draws of all slots.
      state: of the layers, with columns for the completions.
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
        prompt_mask=to_slots(queue.prompt_mask, 0),
        hidden=constrain(to_slots(queue.hidden, 0), "rows", None),
        state=state,
    )


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
      row_ids: [B] int32, the numbers of the rows for `key`.
      key: the random key.
      prompt_mask: [N, P] bool.
      hidden: [N, D], the hidden states of the prompts' last tokens.
      states: what the layers keep of the prompts, [L, N, ...]; empty once every row has its slot.
      max_new_tokens: C.
      fields: [N, P, ...] by name, values of the prompts' tokens that their prefill recorded.
    """

    order: jax.Array
    count: jax.Array
    prompt_ids: jax.Array
    lengths: jax.Array
    limits: jax.Array
    row_ids: jax.Array
    key: jax.Array
    prompt_mask: jax.Array
    hidden: jax.Array
    states: tuple[PromptState, ...]
    max_new_tokens: int = dataclasses.field(metadata={"static": True})
    fields: TokenFields = dataclasses.field(default_factory=dict)

    def empty_draws(self, rows: int, draws: TokenFields) -> TokenFields:
        """Makes empty draws [rows, C, ...] like the draw of one row, [1, ...]."""
        return {name: jnp.zeros((rows, self.max_new_tokens, *x.shape[1:]), x.dtype) for name, x in draws.items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Completions in the order of the rows.

    Attributes:
      draws: [B, C, ...] tokens and fields, arbitrary after the end of a completion.
      lengths: [B] int32, the number of tokens of each completion.
      finished: [B] bool, the rows that EOS or a stop string ended.
    """

    draws: TokenFields
    lengths: jax.Array
    finished: jax.Array

    def write(self, rows: jax.Array, new: "Outputs") -> "Outputs":
        """Writes `new` at `rows`, a scalar or [S]; a row beyond B is dropped."""
        return jax.tree.map(lambda old, x: old.at[rows].set(x, mode="drop"), self, new)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """S rows that are decoded at once, with their KV cache; P columns of prompt and a window of W for completions.

    All slots write the same column in a step, `P + step % W`, as long as no live row has more than W tokens. A row that
    starts in step b has its completion from column `P + b % W` on, and wraps around at the end. Attention takes the
    mask and the position of each column, so the order of columns does not matter. Draws have C columns of their own.

    Attributes:
      step: [] int32, the number of draws so far.
      row: [S] int32, the row of the queue in each slot; B in a slot that has had none.
      first_step: [S] int32, `step` at the first token of the row.
      length: [S] int32, the number of tokens of the completion so far.
      active: [S] bool, the slots that draw another token.
      finished: [S] bool, the rows that EOS or a stop string ended.
      stop_state: [S] int32, the states of the search for stop strings.
      draws: [S, C, ...] tokens and fields, in the column `step % C`.
      prompt_mask: [S, P] bool, the real tokens of the prompts.
      hidden: [S, D], the hidden states that predict the next token.
      state: what the layers keep of the tokens before.
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
    draws: TokenFields
    prompt_mask: jax.Array
    hidden: jax.Array
    state: DecoderState
    outputs: Outputs | None = None
    taken: jax.Array | None = None

    @property
    def max_new_tokens(self) -> int:
        """C."""
        return self.draws["tokens"].shape[1]

    @property
    def prompt_length(self) -> int:
        """P."""
        return self.prompt_mask.shape[1]

    @property
    def window(self) -> int:
        """W."""
        return self.state.columns

    def longest(self) -> jax.Array:
        """Returns the number of tokens of the longest completion that goes on, [] int32."""
        return jnp.max(jnp.where(self.active, self.length, 0))

    def last_tokens(self) -> jax.Array:
        """Returns the latest token of every slot, [S] int32."""
        column = (self.step - 1) % self.max_new_tokens
        return lax.dynamic_index_in_dim(self.draws["tokens"], column, axis=1, keepdims=False)

    def last_column(self) -> jax.Array:
        """Returns the cache column of the latest tokens, [] int32."""
        return self.prompt_length + (self.step - 1) % self.window

    def columns(self, prompt_lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns which columns the latest token of every slot attends to, and their positions in the row.

        Args:
          prompt_lengths: [S] int32, the number of real tokens of each prompt.

        Returns:
          [S, P + W] bool, meaningless in inactive slots; [S, P + W] int32, meaningless where masked.
        """
        # A column holds the token that was drawn `age` steps before the latest.
        age = (self.step - 1 - jnp.arange(self.window)) % self.window
        mask = jnp.concatenate([self.prompt_mask, age < self.length[:, None]], axis=1)
        in_prompt = jnp.arange(-self.prompt_length, 0) + prompt_lengths[:, None]
        latest = prompt_lengths + self.length - 1
        return mask, jnp.concatenate([in_prompt, latest[:, None] - age], axis=1)

    def append(self, new: TokenFields, stop_state: jax.Array, *, ended: jax.Array) -> "Slots":
        """Appends one token to every active slot; other slots stay unchanged.

        Args:
          new: [S, ...], one draw for each slot.
          stop_state: [S] int32, the search for stop strings after the token.
          ended: [S] bool, the slots whose token is EOS or completes a stop string.
        """
        index = self.step % self.max_new_tokens
        active = self.active

        def write(array: jax.Array, values: jax.Array) -> jax.Array:
            # An inactive slot may still contain a completion: none of its columns is overwritten.
            old = lax.dynamic_slice_in_dim(array, index, 1, axis=1)
            is_active = active.reshape(-1, *[1] * (old.ndim - 1))
            new = jnp.where(is_active, values[:, None].astype(array.dtype), old)
            return lax.dynamic_update_slice_in_dim(array, new, index, axis=1)

        return dataclasses.replace(
            self,
            step=self.step + 1,
            length=self.length + active,
            active=active & ~ended,
            finished=self.finished | (active & ended),
            stop_state=stop_state,
            draws=jax.tree.map(write, self.draws, new),
        )

    def record(self, name: str, values: jax.Array) -> "Slots":
        """Writes a field [S, ...] of the latest token of every active slot."""
        column = (self.step - 1) % self.max_new_tokens
        old = lax.dynamic_slice_in_dim(self.draws[name], column, 1, axis=1)
        is_active = self.active.reshape(-1, *[1] * (old.ndim - 1))
        new = jnp.where(is_active, values[:, None].astype(old.dtype), old)
        array = lax.dynamic_update_slice_in_dim(self.draws[name], new, column, axis=1)
        return dataclasses.replace(self, draws={**self.draws, name: array})

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
        """Copies the prompt of a row, with what the layers keep of it, into a slot."""
        prompt = queue.prompt_ids[row]
        changes = {
            "row": row,
            "first_step": self.step,
            "length": 0,
            "active": True,
            "finished": False,
            "stop_state": 0,
            "prompt_mask": queue.prompt_mask[prompt],
            "hidden": queue.hidden[prompt],
        }
        new = {name: getattr(self, name).at[slot].set(value) for name, value in changes.items()}
        return dataclasses.replace(self, **new, state=self.state.write_prompt(queue.states, prompt, slot))
