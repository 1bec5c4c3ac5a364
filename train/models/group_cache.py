"""The KV cache of rows that complete the same prompts: each prompt is stored once and read once for its rows."""

import dataclasses

import jax
import jax.numpy as jnp

from train.models.attention import AttentionMask, AttentionOptions
from train.models.cache import KeyValues, SlotCache
from train.models.sharding import constrain
from train.models.shared import SharedPromptMask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupCache:
    """One layer's cache of R x G rows; the G rows of a prompt are consecutive.

    Attributes:
      prompts: the first P columns, of the R prompts.
      completions: the columns after these, of the R x G rows.
    """

    prompts: SlotCache
    completions: SlotCache

    @classmethod
    def of(cls, layer: KeyValues, group: int, max_new_tokens: int) -> "GroupCache":
        """Builds a cache from prompts [R, P, K, H], with `max_new_tokens` columns of zeros for each row."""
        prompts = SlotCache.of(layer)
        count, heads, head_dim, _ = prompts.key.shape
        key = jnp.zeros((count * group, heads, head_dim, max_new_tokens), prompts.key.dtype)
        completions = (constrain(x, "rows", "kv_heads", None, None) for x in (key, key.transpose(0, 1, 3, 2)))
        return cls(prompts, SlotCache(*completions))

    def write(self, new: KeyValues, column: int | jax.Array) -> "GroupCache":
        """Returns this cache with `new` [B, s, K, H] written from a column (a scalar, at least P) on."""
        return GroupCache(self.prompts, self.completions.write(new, column - self.prompts.key.shape[-1]))

    def attend(self, query: jax.Array, mask: AttentionMask | SharedPromptMask, options: AttentionOptions) -> jax.Array:
        """Computes the attention of one query per row, [B, 1, N, H]; the formula of `train.models.attention.attend`.

        One softmax over two arrays of scores: both are shifted by the larger of their maxima, and their sums of
        exponentials are added.
        """
        assert isinstance(mask, AttentionMask)
        rows, _, heads, head_dim = query.shape
        wide = jnp.promote_types(query.dtype, jnp.float32)
        columns = self.prompts.key.shape[-1]
        grouped = query.reshape(rows, self.completions.key.shape[1], -1, head_dim)
        seen = mask.for_layer(options.sliding)
        prompt_seen = jnp.broadcast_to(seen[..., :columns], (*grouped.shape[:1], 1, grouped.shape[2], columns))

        def weighted_values(weights: jax.Array, cache: SlotCache) -> jax.Array:
            return jnp.einsum("BKGS,BKSH->BKGH", weights.astype(query.dtype), cache.value, preferred_element_type=wide)

        near = self.completions.scores(grouped, seen[..., columns:], options)
        far = self.prompts.scores(self._by_prompt(grouped), self._by_prompt(prompt_seen), options)
        top = jnp.maximum(_max(near), self._by_row(_max(far)))
        near, far = jnp.exp(near - top), jnp.exp(far - self._by_prompt(top))
        output = weighted_values(near, self.completions) + self._by_row(weighted_values(far, self.prompts))
        output = output / (_sum(near) + self._by_row(_sum(far)))
        output = output.astype(query.dtype).reshape(rows, 1, heads, head_dim)
        return jnp.where(jnp.any(seen, axis=-1, keepdims=True), output, 0)

    def _by_prompt(self, x: jax.Array) -> jax.Array:
        """Regroups rows by prompt: [B, K, n, w] to [R, K, (B / R) n, w]."""
        count, (rows, heads, _, last) = self.prompts.key.shape[0], x.shape
        return x.reshape(count, rows // count, heads, -1, last).swapaxes(1, 2).reshape(count, heads, -1, last)

    def _by_row(self, x: jax.Array) -> jax.Array:
        """Inverts `_by_prompt`."""
        (count, heads, _, last), rows = x.shape, self.completions.key.shape[0]
        return x.reshape(count, heads, rows // count, -1, last).swapaxes(1, 2).reshape(rows, heads, -1, last)


def _max(x: jax.Array) -> jax.Array:
    return jnp.max(x, axis=-1, keepdims=True)


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, keepdims=True)
