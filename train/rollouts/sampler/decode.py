"""The keys and values of the slots, and one more token for each of them."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax

from train.models import Decoder, GroupCache, KeyValues, SlotCache, Turns, layer_variables, rotations
from train.models.sharding import axis_size, constrain

Tree = Any
# The prompt of each row, along an axis that has the prompts.
Pick: TypeAlias = Callable[[jax.Array, int], jax.Array]
Cache = KeyValues | list[SlotCache] | list[GroupCache]


@dataclasses.dataclass(frozen=True)
class Decoding:
    """The model in the loop.

    Attributes:
      model: the decoder.
      variables: what `model.apply` takes.
      layers: of each layer where these run one after the other, each with a cache of its own that is updated where it
        is; None: one loop over layers, whatever the depth, at the price of copies out of the stack and into it.
      turns: the rotations of all positions [1, S, 1, H / 2], looked up where layers run one after the other: each of
        them would compute sines and cosines for itself, in the same loop as what it does with them.
    """

    model: Decoder
    variables: dict[str, Tree]
    layers: list[Any] | None
    turns: Turns | None

    @classmethod
    def of(cls, model: Decoder, variables: dict[str, Tree], columns: int, dtype: Any, *, unroll: bool) -> "Decoding":
        """With layers apart if `unroll`; their weights are copied out of the stack once, before the loop.

        Args:
          columns: the most tokens of a row; dtype: that is computed in.
        """
        if not unroll:
            return cls(model, variables, None, None)
        turns = rotations(model.config, jnp.arange(columns)[None], dtype)
        return cls(model, variables, layer_variables(variables, model.config.layers), turns)

    def first(self, prompts: KeyValues, room: int) -> Cache:
        """The cache of slots that begin with `prompts` [L, S, P, K, H], with `room` columns after them."""

        def widened(x: jax.Array, axis: int, *axes: str | None) -> jax.Array:
            return constrain(jnp.pad(x, [(0, room if axis == n else 0) for n in range(x.ndim)]), *axes)

        if self.layers is None:
            return jax.tree.map(lambda x: widened(x, 2, "layers", "rows", None, "kv_heads", None), prompts)
        axes = ("rows", "kv_heads", None, None)
        split = [SlotCache.of(one) for one in self._apart(prompts)]
        return [SlotCache(widened(one.key, 3, *axes), widened(one.value, 2, *axes)) for one in split]

    def whole(self, prompts: KeyValues, pick: Pick, group: int, room: int) -> Cache:
        """The cache of a slot for every row: `group` rows of each prompt [L, N, P, K, H], or those of `pick`."""
        # On a mesh a prompt may be on another device than its rows.
        if group == 1 or self.layers is None or axis_size("rows") > 1:
            return self.first(jax.tree.map(lambda x: pick(x, 1), prompts), room)
        return [GroupCache.of(one, group, room) for one in self._apart(prompts)]

    def _apart(self, stacked: KeyValues) -> list[KeyValues]:
        return [jax.tree.map(lambda x, n=n: x[n], stacked) for n in range(self.model.config.layers)]

    def load(self, cache: Cache, slot: jax.Array, prompts: KeyValues, prompt: jax.Array) -> Cache:
        """The cache with one prompt's columns copied into one slot; what is after them is in no mask."""
        # Gathered and not sliced: where prompts are spread over devices, this one is sent and not all of them.
        one = jax.tree.map(lambda x: jnp.take(x, prompt[None], axis=1, mode="clip"), prompts)
        if isinstance(cache, KeyValues):
            return jax.tree.map(lambda into, x: lax.dynamic_update_slice(into, x, (0, slot, 0, 0, 0)), cache, one)
        # Rows that share a prompt's columns are all there from the start.
        apart = cast(list[SlotCache], cache)
        return [old.write(new, 0, slot) for old, new in zip(apart, self._apart(one), strict=True)]

    def step(
        self,
        cache: Cache,
        tokens: jax.Array,
        positions: jax.Array,
        token_mask: jax.Array,
        *,
        column: jax.Array,
        key_positions: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Hidden states [slots, D] that predict what follows `tokens` [slots], and the cache with them in `column`."""
        turns = jax.tree.map(lambda x: jnp.take(x[0], positions, axis=0, mode="clip")[:, None], self.turns)
        return self.model.apply(
            self.variables,
            tokens,
            positions,
            cache,
            token_mask,
            column,
            key_positions=key_positions,
            layers=self.layers,
            turns=turns,
            method=Decoder.decode,
        )
