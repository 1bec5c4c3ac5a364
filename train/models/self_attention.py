"""The attention module of full and of sliding layers, and the inputs that all layers share.

Shapes: B rows, T tokens, K key-value heads, H head width, D model width.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from train.models.attention import AttentionOptions
from train.models.attention.spans import Spans
from train.models.cache import CacheMask, KeyValues, LayerCache
from train.models.config import DecoderConfig
from train.models.layers import InitKey, Linear, norm, param, projection, residual_scale
from train.models.projections import project
from train.models.rope import RopeTables, apply_rope
from train.models.sharding import whole_sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerContext:
    """Inputs that all layers share.

    Attributes:
      keys: the keys that each token attends to: spans of whole rows, or the columns of a cache.
      real: [B, T] bool, the tokens that are no padding.
      rope: cosines and sines of the queries' positions.
      column: the queries' cache column, a scalar.
      routes: [B, T, k] int, the experts of each token in this layer; -1: the router chooses. None: it does everywhere.
    """

    keys: Spans | CacheMask
    real: jax.Array
    rope: RopeTables
    column: int | jax.Array = 0
    routes: jax.Array | None = None


class SelfAttention(nnx.Module):
    """Grouped-query self-attention.

    Attributes:
      rows_may_join: whether `LayerContext.keys` alone says which tokens a token depends on, so that rows can be packed
        and share prompts.
    """

    rows_may_join: ClassVar[bool] = True

    @staticmethod
    def state_bytes(config: DecoderConfig, tokens: int) -> int:
        """Counts the bytes of one layer's keys and values of a number of tokens, on all devices together."""
        return 2 * tokens * config.kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize

    def __init__(self, config: DecoderConfig, key: InitKey):
        self.config = config
        width = config.width
        heads = config.heads * config.head_dim
        kv_heads = config.kv_heads * config.head_dim
        bias = config.qkv_bias
        self.q_proj = projection(config, "q_proj", (width, heads), ("embed", "heads"), key, bias=bias)
        self.k_proj = projection(config, "k_proj", (width, kv_heads), ("embed", "kv_heads"), key, bias=bias)
        self.v_proj = projection(config, "v_proj", (width, kv_heads), ("embed", "kv_heads"), key, bias=bias)
        if config.qk_norm or config.wide_qk_norm:
            widths = (heads, kv_heads) if config.wide_qk_norm else (config.head_dim, config.head_dim)
            self.q_norm = norm(config, widths[0])
            self.k_norm = norm(config, widths[1])
        if config.sinks:
            self.sinks = param(jnp.zeros(config.heads, jnp.dtype(config.param_dtype)), ("heads",))
        self.o_proj = projection(
            config,
            "o_proj",
            (heads, width),
            ("heads", "embed"),
            key,
            bias=config.output_bias,
            init_scale=residual_scale(config),
        )

    def projection_groups(self) -> tuple[tuple[Linear, ...], ...]:
        """Lists the projections by their input."""
        return (self.q_proj, self.k_proj, self.v_proj), (self.o_proj,)

    def __call__(
        self, x: jax.Array, cache: LayerCache | None, sliding: bool | jax.Array, context: LayerContext
    ) -> tuple[jax.Array, KeyValues | LayerCache]:
        """Returns the output [B, T, D], and the cache with the keys and values of x; without one, these alone."""
        config = self.config

        def heads_of(projected: jax.Array) -> jax.Array:
            return projected.reshape(*x.shape[:-1], -1, config.head_dim)

        query, key, value = project(x, self.q_proj, self.k_proj, self.v_proj)
        if config.wide_qk_norm:
            query = self.q_norm(query)
            key = self.k_norm(key)
        if config.qkv_clip is not None:
            query, key, value = (jnp.clip(y, -config.qkv_clip, config.qkv_clip) for y in (query, key, value))
        query = heads_of(query)
        key = heads_of(key)
        value = heads_of(value)
        if config.qk_norm:
            query = self.q_norm(query)
            key = self.k_norm(key)
        rope = context.rope.for_layer(sliding)
        query = apply_rope(query, rope)
        new = KeyValues(apply_rope(key, rope), value)
        if cache is None:
            new = jax.tree.map(whole_sequences, new)
        keys: Any = new if cache is None else cache.write(new, jnp.asarray(context.column))
        sinks = self.sinks[...] if config.sinks else None
        scale = config.attention_scale
        softcap = config.attention_softcap
        options = AttentionOptions(sliding, scale, softcap, sinks, kernels=config.attention != "xla")
        output = keys.attend(query, context.keys, options)
        (output,) = project(output.reshape(*x.shape[:-1], -1), self.o_proj)
        return output, keys
