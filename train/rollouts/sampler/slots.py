"""Slots: rows that are decoded at once. One that has finished is handed over and takes the next row of the queue."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from train.rollouts.sampler.decode import Cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The state of every slot; S slots, P columns of prompt, C of completion.

    All slots write the same column at a time, `P + round % C`: a row that began in round b holds its completion from
    `P + b % C` on, around the end. Attention needs the mask of a column and its position, not its place.

    Attributes:
      round: [] int32, draws so far.
      row: [S] int32, which of the B rows that were asked for.
      began: [S] int32, the round of the row's first draw.
      drawn: [S] int32, its tokens so far.
      live: [S] bool, whether it goes on.
      ended: [S] bool, whether it was ended by EOS or a stop string.
      search: [S] int32, the state of the search for stop strings.
      tokens, token_mask: [S, P + C]; log_probs: [S, C].
      hidden: [S, D], predicts the next token.
      cache: keys and values.
    """

    round: jax.Array
    row: jax.Array
    began: jax.Array
    drawn: jax.Array
    live: jax.Array
    ended: jax.Array
    search: jax.Array
    tokens: jax.Array
    token_mask: jax.Array
    log_probs: jax.Array
    hidden: jax.Array
    cache: Cache

    @property
    def room(self) -> int:
        """C."""
        return self.log_probs.shape[1]

    @property
    def width(self) -> int:
        """P."""
        return self.tokens.shape[1] - self.room

    def last_column(self) -> jax.Array:
        """The column of the latest draw."""
        return self.width + (self.round - 1) % self.room

    def key_positions(self, length: jax.Array) -> jax.Array:
        """[S, P + C] position of every column in its row, of prompts of `length` [S]; means nothing under the mask."""
        column = jnp.arange(self.width + self.room)
        inside = column - self.width + length[:, None]
        after = length[:, None] + (column - self.width - self.began[:, None]) % self.room
        return jnp.where(column < self.width, inside, after)

    def append(self, tokens: jax.Array, log_probs: jax.Array, search: jax.Array, *, ended: jax.Array) -> "Slots":
        """One draw further; slots that are not live stay as they are.

        Args:
          tokens, log_probs: [S], what was drawn.
          search: [S], the search for stop strings after it.
          ended: [S] bool, the slots that this token ends.
        """
        place, live = self.round % self.room, self.live

        def put(into: jax.Array, values: jax.Array, column: jax.Array) -> jax.Array:
            # A slot that is done may still hold its row: no column of it is overwritten.
            old = lax.dynamic_slice_in_dim(into, column, 1, axis=1)
            new = jnp.where(live[:, None], values[:, None].astype(into.dtype), old)
            return lax.dynamic_update_slice_in_dim(into, new, column, axis=1)

        return dataclasses.replace(
            self,
            round=self.round + 1,
            drawn=self.drawn + live,
            live=live & ~ended,
            ended=self.ended | (live & ended),
            search=search,
            tokens=put(self.tokens, tokens, self.width + place),
            token_mask=put(self.token_mask, live, self.width + place),
            log_probs=put(self.log_probs, log_probs, place),
        )

    def completions(self) -> tuple[jax.Array, jax.Array]:
        """Tokens and log-probs [S, C], each row from its own beginning; what is after its end means nothing."""
        place = (self.began[:, None] + jnp.arange(self.room)) % self.room
        drawn = self.tokens[:, self.width :]
        return jnp.take_along_axis(drawn, place, axis=1), jnp.take_along_axis(self.log_probs, place, axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Done:
    """Completions in the order asked for: tokens and log_probs [B, C], lengths [B], ended [B]."""

    tokens: jax.Array
    log_probs: jax.Array
    lengths: jax.Array
    ended: jax.Array

    @classmethod
    def none(cls, rows: int, slots: Slots) -> "Done":
        """Nothing is done yet."""
        shape = (rows, slots.room)
        return cls(
            jnp.zeros(shape, jnp.int32),
            jnp.zeros(shape, slots.log_probs.dtype),
            jnp.zeros(rows, jnp.int32),
            jnp.zeros(rows, bool),
        )

    def put_all(self, slots: Slots) -> "Done":
        """With what every slot holds; a row beyond B is dropped."""
        tokens, log_probs = slots.completions()
        new = Done(tokens, log_probs, slots.drawn, slots.ended)
        return jax.tree.map(lambda old, x: old.at[slots.row].set(x, mode="drop"), self, new)

    def put(self, slots: Slots, slot: jax.Array) -> "Done":
        """With what one slot holds."""

        chosen = jnp.arange(len(slots.row)) == slot

        def one(x: jax.Array) -> jax.Array:
            # A sum and no index: where slots are spread over devices, what is sent is this slot and not all of them.
            mine = chosen.reshape(-1, *[1] * (x.ndim - 1))
            return jnp.sum(jnp.where(mine, x, 0), axis=0, dtype=x.dtype)

        def turned(x: jax.Array) -> jax.Array:
            return jnp.roll(one(x), -one(slots.began) % slots.room)

        tokens = turned(slots.tokens[:, slots.width :])
        new = Done(tokens, turned(slots.log_probs), one(slots.drawn), jnp.any(chosen & slots.ended))
        return jax.tree.map(lambda old, x: old.at[one(slots.row)].set(x, mode="drop"), self, new)
