"""The keys and values of the slots, and one more token for each of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from train.models import Decoder, KeyValues, SlotCache, layer_variables
from train.sharding import constrain

Tree = Any
Cache = KeyValues | list[SlotCache]


@dataclasses.dataclass(frozen=True)
class Decoding:
    """The model in the loop.

    Attributes:
      model: the decoder.
      variables: what `model.apply` takes.
      layers: of each layer where these run one after the other, each with a cache of its own that is updated where it
        is; None: one loop over layers, whatever the depth, at the price of copies out of the stack and into it.
    """

    model: Decoder
    variables: dict[str, Tree]
    layers: list[Any] | None

    @classmethod
    def of(cls, model: Decoder, variables: dict[str, Tree], *, unroll: bool) -> "Decoding":
        """With layers apart if `unroll`; their weights are copied out of the stack once, before the loop."""
        return cls(model, variables, layer_variables(variables, model.config.layers) if unroll else None)

    def first(self, prompts: KeyValues, room: int) -> Cache:
        """The cache of slots that begin with `prompts` [L, S, P, K, H], with `room` columns after them."""

        def widened(x: jax.Array, axis: int, *axes: str | None) -> jax.Array:
            return constrain(jnp.pad(x, [(0, room if axis == n else 0) for n in range(x.ndim)]), *axes)

        if self.layers is None:
            return jax.tree.map(lambda x: widened(x, 2, "layers", "rows", None, "kv_heads", None), prompts)
        axes = ("rows", "kv_heads", None, None)
        split = [SlotCache.of(jax.tree.map(lambda x, n=n: x[n], prompts)) for n in range(len(self.layers))]
        return [SlotCache(widened(one.key, 3, *axes), widened(one.value, 2, *axes)) for one in split]

    def load(self, cache: Cache, slot: jax.Array, prompts: KeyValues, prompt: jax.Array) -> Cache:
        """The cache with one prompt's columns copied into one slot; what is after them is in no mask."""
        # Gathered and not sliced: where prompts are spread over devices, this one is sent and not all of them.
        one = jax.tree.map(lambda x: jnp.take(x, prompt[None], axis=1, mode="clip"), prompts)
        if isinstance(cache, KeyValues):
            return jax.tree.map(lambda into, x: lax.dynamic_update_slice(into, x, (0, slot, 0, 0, 0)), cache, one)
        return [old.write(KeyValues(one.key[n], one.value[n]), 0, slot) for n, old in enumerate(cache)]

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
        return self.model.apply(
            self.variables,
            tokens,
            positions,
            cache,
            token_mask,
            column,
            key_positions=key_positions,
            layers=self.layers,
            method=Decoder.decode,
        )
