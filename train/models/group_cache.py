"""The cache of rows that complete the same prompts: what a prompt holds is there once, and read once for them all."""

import dataclasses

import jax
import jax.numpy as jnp

from train.models.attention import Sight, mask_of
from train.models.cache import KeyValues, SlotCache
from train.models.sharding import constrain
from train.models.shared import SharedSight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupCache:
    """One layer's cache of N x group rows, those of a prompt one after the other.

    Attributes:
      prompts: of the N prompts, the first P columns of every row.
      own: of the rows, the columns after these.
    """

    prompts: SlotCache
    own: SlotCache

    @classmethod
    def of(cls, layer: KeyValues, group: int, room: int) -> "GroupCache":
        """From keys and values [N, P, K, H] of one layer, with `room` columns of zeros for each row."""
        prompts = SlotCache.of(layer)
        count, heads, width, _ = prompts.key.shape
        key = jnp.zeros((count * group, heads, width, room), prompts.key.dtype)
        own = (constrain(x, "rows", "kv_heads", None, None) for x in (key, key.transpose(0, 1, 3, 2)))
        return cls(prompts, SlotCache(*own))

    def write(self, new: KeyValues, column: int | jax.Array) -> "GroupCache":
        """This cache with `new` [B, s, K, H] written from a column (a scalar, at least P) on."""
        return GroupCache(self.prompts, self.own.write(new, column - self.prompts.key.shape[-1]))

    def attend(
        self,
        query: jax.Array,
        sight: Sight | SharedSight,
        *,
        sliding: bool | jax.Array,
        scale: float | None,
        softcap: float | None,
    ) -> jax.Array:
        """What one query per row [B, 1, N, H] reads; the formula of `train.models.attention.attend`.

        The softmax goes over two arrays of scores: sums of exponentials of what exceeds the larger of their maxima.
        """
        assert isinstance(sight, Sight)
        rows, _, heads, width = query.shape
        wide = jnp.promote_types(query.dtype, jnp.float32)
        columns = self.prompts.key.shape[-1]
        grouped = query.reshape(rows, self.own.key.shape[1], -1, width)
        mask = mask_of(sight, sliding)
        spread = jnp.broadcast_to(mask[..., :columns], (*grouped.shape[:1], 1, grouped.shape[2], columns))

        def values(weights: jax.Array, cache: SlotCache) -> jax.Array:
            return jnp.einsum("bkgs,bksh->bkgh", weights.astype(query.dtype), cache.value, preferred_element_type=wide)

        near = self.own.scores(grouped, mask[..., columns:], scale=scale, softcap=softcap)
        far = self.prompts.scores(self._by_prompt(grouped), self._by_prompt(spread), scale=scale, softcap=softcap)
        top = jnp.maximum(_max(near), self._by_row(_max(far)))
        near, far = jnp.exp(near - top), jnp.exp(far - self._by_prompt(top))
        output = values(near, self.own) + self._by_row(values(far, self.prompts))
        output = output / (_sum(near) + self._by_row(_sum(far)))
        output = output.astype(query.dtype).reshape(rows, 1, heads, width)
        return jnp.where(jnp.any(mask, axis=-1, keepdims=True), output, 0)

    def _by_prompt(self, x: jax.Array) -> jax.Array:
        """[B, K, G, w] of rows as [N, K, B / N * G, w]."""
        count, (rows, heads, _, last) = self.prompts.key.shape[0], x.shape
        return x.reshape(count, rows // count, heads, -1, last).swapaxes(1, 2).reshape(count, heads, -1, last)

    def _by_row(self, x: jax.Array) -> jax.Array:
        """The inverse of `_by_prompt`."""
        (count, heads, _, last), rows = x.shape, self.own.key.shape[0]
        return x.reshape(count, heads, rows // count, -1, last).swapaxes(1, 2).reshape(rows, heads, -1, last)


def _max(x: jax.Array) -> jax.Array:
    return jnp.max(x, axis=-1, keepdims=True)


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, keepdims=True)
