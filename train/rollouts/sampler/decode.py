"""The keys and values of the slots, and one more token for each of them."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax

from train.models import GroupCache, KeyValues, RopeTables, SlotCache, Transformer, rope_tables
from train.models.sharding import axis_size, constrain

Tree = Any
# The prompt of each row, along an axis that has the prompts.
Pick: TypeAlias = Callable[[jax.Array, int], jax.Array]
Cache = KeyValues | list[SlotCache] | list[GroupCache]


@dataclasses.dataclass(frozen=True)
class Decoding:
    """The model in the loop.

    Attributes:
      transformer: the decoder and its weights.
      rope: `rope_tables` of all positions [1, S], looked up if the layers are unrolled, each of which would compute
        sines and cosines again, fused with their use. None: one loop over stacked layers, whose program does not grow
        with the depth, at the price of copies out of the stack of caches and back.
    """

    transformer: Transformer
    rope: RopeTables | None

    @classmethod
    def of(cls, transformer: Transformer, columns: int, dtype: Any, *, unroll: bool) -> "Decoding":
        """Copies the layers out of the stack once, before the loop, if `unroll`.

        Args:
          transformer: with stacked layers.
          columns: the most tokens of a row.
          dtype: the compute type.
          unroll: whether decoding goes through the layers one by one, not in a loop.
        """
        if not unroll:
            return cls(transformer, None)
        rope = rope_tables(transformer.config, jnp.arange(columns)[None], dtype)
        return cls(transformer.unrolled(), rope)

    def first(self, prompts: KeyValues, room: int) -> Cache:
        """The cache of slots that begin with `prompts` [L, S, P, K, H], with `room` columns after them."""

        def widened(x: jax.Array, axis: int, *axes: str | None) -> jax.Array:
            return constrain(jnp.pad(x, [(0, room if axis == n else 0) for n in range(x.ndim)]), *axes)

        if self.rope is None:
            return jax.tree.map(lambda x: widened(x, 2, "layers", "rows", None, "kv_heads", None), prompts)
        axes = ("rows", "kv_heads", None, None)
        split = [SlotCache.of(one) for one in self._apart(prompts)]
        return [SlotCache(widened(one.key, 3, *axes), widened(one.value, 2, *axes)) for one in split]

    def whole(self, prompts: KeyValues, pick: Pick, group: int, room: int) -> Cache:
        """The cache of a slot for every row: `group` rows of each prompt [L, N, P, K, H], or those of `pick`."""
        # On a mesh a prompt may be on another device than its rows.
        if group == 1 or self.rope is None or axis_size("rows") > 1:
            return self.first(jax.tree.map(lambda x: pick(x, 1), prompts), room)
        return [GroupCache.of(one, group, room) for one in self._apart(prompts)]

    def _apart(self, stacked: KeyValues) -> list[KeyValues]:
        return [jax.tree.map(lambda x, n=n: x[n], stacked) for n in range(self.transformer.config.layers)]

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
        rope = jax.tree.map(lambda x: jnp.take(x[0], positions, axis=0, mode="clip")[:, None], self.rope)
        hidden, cache_with_token = self.transformer.decode(
            tokens, positions, cache, token_mask, column, key_positions=key_positions, rope=rope
        )
        return hidden, cast(Cache, cache_with_token)
