"""The attention module of full and of sliding layers, and the inputs that all layers share.

Shapes: B rows, T tokens, K key-value heads, H head width, D model width.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from train.models.attention import AttentionOptions, choose_implementation
from train.models.attention.cudnn import HeadsOfRows, cudnn_groups, join_groups
from train.models.attention.spans import Spans
from train.models.cache import CacheMask, GroupCache, KeyValues, LayerCache, SlotCache
from train.models.config import DecoderConfig
from train.models.fused import heads
from train.models.layers import InitKey, Linear, norm, param, projection, residual_scale
from train.models.projections import project, project_together
from train.models.rope import RopeTables, apply_rope
from train.models.sharding import device_kind, divides, whole_sequences


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
        q_width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        bias = config.qkv_bias
        self.q_proj = projection(config, "q_proj", (width, q_width), ("embed", "heads"), key, bias=bias)
        self.k_proj = projection(config, "k_proj", (width, kv_width), ("embed", "kv_heads"), key, bias=bias)
        self.v_proj = projection(config, "v_proj", (width, kv_width), ("embed", "kv_heads"), key, bias=bias)
        if config.qk_norm or config.wide_qk_norm:
            widths = (q_width, kv_width) if config.wide_qk_norm else (config.head_dim, config.head_dim)
            self.q_norm = norm(config, widths[0])
            self.k_norm = norm(config, widths[1])
        if config.sinks:
            self.sinks = param(jnp.zeros(config.heads, jnp.dtype(config.param_dtype)), ("heads",))
        self.o_proj = projection(
            config,
            "o_proj",
            (q_width, width),
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
        if cache is None and self._is_fused(x):
            return self._run_fused(x, sliding, context)
        if isinstance(cache, GroupCache) and self._is_fused(x) and divides(len(cache.prompts.key), "rows"):
            return self._decode_fused(x, cache, sliding, context)

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
        output = keys.attend(query, context.keys, self._options(sliding))
        (output,) = project(output.reshape(*x.shape[:-1], -1), self.o_proj)
        return output, keys

    def _options(self, sliding: bool | jax.Array) -> AttentionOptions:
        config = self.config
        sinks = self.sinks[...] if config.sinks else None
        kernels = config.attention != "xla"
        return AttentionOptions(sliding, config.attention_scale, config.attention_softcap, sinks, kernels=kernels)

    def _is_fused(self, x: jax.Array) -> bool:
        """Whether one kernel computes the heads of whole rows [B, T, D]."""
        config = self.config
        sizes = {"rows": len(x), "tokens": x.shape[1], "heads": config.heads, "kv_heads": config.kv_heads}
        return (
            config.attention != "xla"
            and not config.wide_qk_norm
            and config.qkv_clip is None
            and heads.can_fuse(config.head_dim, x.dtype)
            and all(divides(size, axis) for axis, size in sizes.items())
        )

    def _run_fused(self, x: jax.Array, sliding: bool | jax.Array, context: LayerContext) -> tuple[jax.Array, KeyValues]:
        """Computes whole rows as `__call__`; one kernel writes the heads where attention reads them."""
        config = self.config
        spans = context.keys
        assert isinstance(spans, Spans)
        options = self._options(sliding)
        query, key = (
            jax.ShapeDtypeStruct((*x.shape[:2], count, config.head_dim), x.dtype)
            for count in (config.heads, config.kv_heads)
        )
        in_parts = spans.group is not None and choose_implementation(query, key, spans, options) == "cudnn"
        statics = self._head_statics()._replace(group=spans.group if in_parts else None)
        rope = context.rope.for_layer(sliding)
        projected = project_together(x, self.q_proj, self.k_proj, self.v_proj)
        computed = heads.qkv_heads(statics, projected, self._head_scales(), rope.cos[:, :, 0], rope.sin[:, :, 0])
        if isinstance(computed, HeadsOfRows):
            keys = jax.tree.map(whole_sequences, KeyValues(computed.key, computed.value))
            output = keys.attend(computed.query, spans, options)
            (output,) = project(output.reshape(*x.shape[:-1], -1), self.o_proj)
            return output, keys
        outputs = cudnn_groups(computed, spans, sliding, scale=options.scale or config.head_dim**-0.5)
        first, later = (x.reshape(*x.shape[:2], -1) for x in outputs)
        # With the same weights the compiler would join both products, and slice their result.
        (first,) = project(first, jax.lax.optimization_barrier(self.o_proj))
        (later,) = project(later, self.o_proj)
        whole = join_groups(computed)
        return jnp.concatenate([first, later.reshape(len(x), -1, later.shape[-1])], axis=1), KeyValues(
            whole.key, whole.value
        )

    def _decode_fused(
        self, x: jax.Array, cache: GroupCache, sliding: bool | jax.Array, context: LayerContext
    ) -> tuple[jax.Array, GroupCache]:
        """Computes one token a row [B, 1, D] as `__call__` does; one kernel writes its heads, also into the cache."""
        assert isinstance(context.keys, CacheMask)
        rope = context.rope.for_layer(sliding)
        own = cache.completions
        by_row, by_prompt, key, value = heads.decode_heads(
            self._head_statics(),
            project_together(x, self.q_proj, self.k_proj, self.v_proj),
            self._head_scales(),
            rope.cos[:, :, 0],
            rope.sin[:, :, 0],
            (own.key, own.value),
            jnp.asarray(context.column) - cache.prompts.columns,
            prompts=len(cache.prompts.key),
        )
        written = GroupCache(cache.prompts, SlotCache(key, value))
        output = written.attend_grouped(by_row, by_prompt, context.keys, self._options(sliding))
        (output,) = project(output.reshape(*x.shape[:-1], -1), self.o_proj)
        return output, written

    def _head_statics(self) -> heads.HeadStatics:
        config = self.config
        return heads.HeadStatics(
            config.heads,
            config.kv_heads,
            config.head_dim,
            eps=config.norm_eps,
            offset=config.norm_offset,
            interpret=device_kind() == "cpu",
        )

    def _head_scales(self) -> tuple[jax.Array, jax.Array] | None:
        return (self.q_norm.scale[...], self.k_norm.scale[...]) if self.config.qk_norm else None
