"""The decoder's modules, named as in Hugging Face checkpoints.

Shapes: B rows, T tokens, K key-value heads, H head width, D model width. All layers are one `DecoderLayer` whose
parameters have a leading axis: a scan goes through them, so that neither the program nor the time to compile it grows
with the depth.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx

from train.models.attention import (
    AttentionMask,
    AttentionOptions,
    cache_mask,
    causal_mask,
    token_positions,
)
from train.models.cache import GroupCache, KeyValues, LayerCache, SlotCache, StackedLayer
from train.models.config import DecoderConfig
from train.models.layers import Embed, InitKey, Linear, RMSNorm, in_pieces, nth_layer, scanned_layers
from train.models.packing import (
    PackedRows,
    SharedPromptMask,
    pack,
    pack_rows,
    packed_mask,
    packed_positions,
    shared_prompt_mask,
    unpack,
    unpack_states,
)
from train.models.rope import RopeTables, apply_rope, rope_tables
from train.models.sharding import split_tokens, whole_sequences

Cache: TypeAlias = GroupCache | Sequence[GroupCache]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerContext:
    """Inputs that all layers share.

    Attributes:
      mask: the keys that each query attends to.
      rope: cosines and sines of the queries' positions.
      column: the queries' cache column, a scalar.
    """

    mask: AttentionMask | SharedPromptMask
    rope: RopeTables
    column: int | jax.Array = 0


def _norm(config: DecoderConfig, width: int | None = None) -> RMSNorm:
    return RMSNorm(
        config.width if width is None else width,
        eps=config.norm_eps,
        offset=config.norm_offset,
        param_dtype=config.param_dtype,
    )


def _projection(
    config: DecoderConfig, name: str, sizes: tuple[int, int], axes: tuple[str, str], key: InitKey, **options: Any
) -> Linear:
    lora = config.lora if config.lora is not None and name in config.lora.targets else None
    return Linear(
        *sizes,
        axes,
        key=key.child(name),
        lora=lora,
        param_dtype=config.param_dtype,
        quantization=config.quantization,
        **options,
    )


def _residual_scale(config: DecoderConfig) -> float:
    """Returns the init scale of projections that write to the residual stream: its size does not grow with depth."""
    return float((2 * config.layers) ** -0.5)


class Attention(nnx.Module):
    """Grouped-query self-attention."""

    def __init__(self, config: DecoderConfig, key: InitKey):
        self.config = config
        width, heads, kv_heads = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
        bias = config.qkv_bias
        self.q_proj = _projection(config, "q_proj", (width, heads), ("embed", "heads"), key, bias=bias)
        self.k_proj = _projection(config, "k_proj", (width, kv_heads), ("embed", "kv_heads"), key, bias=bias)
        self.v_proj = _projection(config, "v_proj", (width, kv_heads), ("embed", "kv_heads"), key, bias=bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = _norm(config, config.head_dim), _norm(config, config.head_dim)
        self.o_proj = _projection(
            config,
            "o_proj",
            (heads, width),
            ("heads", "embed"),
            key,
            bias=config.output_bias,
            init_scale=_residual_scale(config),
        )

    def __call__(
        self, x: jax.Array, cache: LayerCache | None, sliding: bool | jax.Array, context: LayerContext
    ) -> tuple[jax.Array, KeyValues | LayerCache]:
        """Returns the output [B, T, D], and the cache with the keys and values of x; without one, these alone."""
        config = self.config

        def heads_of(projected: jax.Array) -> jax.Array:
            return projected.reshape(*x.shape[:-1], -1, config.head_dim)

        query, key, value = heads_of(self.q_proj(x)), heads_of(self.k_proj(x)), heads_of(self.v_proj(x))
        if config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        rope = context.rope.for_layer(sliding)
        query, new = apply_rope(query, rope), KeyValues(apply_rope(key, rope), value)
        if cache is None:
            new = jax.tree.map(whole_sequences, new)
        keys: Any = new if cache is None else cache.write(new, jnp.asarray(context.column))
        options = AttentionOptions(sliding, config.attention_scale, config.attention_softcap)
        output = keys.attend(query, context.mask, options)
        return self.o_proj(output.reshape(*x.shape[:-1], -1)), keys


class Mlp(nnx.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig, key: InitKey):
        self.config = config
        sizes, axes, bias = (config.width, config.mlp_width), ("embed", "mlp"), config.mlp_bias
        self.gate_proj = _projection(config, "gate_proj", sizes, axes, key, bias=bias)
        self.up_proj = _projection(config, "up_proj", sizes, axes, key, bias=bias)
        self.down_proj = _projection(
            config, "down_proj", sizes[::-1], axes[::-1], key, bias=bias, init_scale=_residual_scale(config)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.gate_proj(x), self.up_proj(x)
        activated = jax.nn.silu(gate) if self.config.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self.down_proj(activated * up)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each with its norms and its residual connection."""

    def __init__(self, config: DecoderConfig, key: InitKey):
        self.config = config
        self.input_layernorm = _norm(config)
        self.self_attn = Attention(config, key.child("self_attn"))
        self.post_attention_layernorm = _norm(config)
        if config.post_norms:
            self.pre_feedforward_layernorm = _norm(config)
            self.post_feedforward_layernorm = _norm(config)
        self.mlp = Mlp(config, key.child("mlp"))

    def __call__(
        self, x: jax.Array, cache: LayerCache | None, sliding: bool | jax.Array | None, context: LayerContext
    ) -> tuple[jax.Array, KeyValues | LayerCache]:
        """Returns the output [B, T, D], and the layer's cache with the keys and values of x; without one, these alone.

        Args:
          x: [B, T, D].
          cache: earlier keys and values; None: x are whole sequences.
          sliding: whether this is a sliding layer, may be traced; None: as all layers of the decoder.
          context: inputs that all layers share.
        """
        sliding = self.config.kinds[0] == "sliding" if sliding is None else sliding
        mixed, new = self.self_attn(self.input_layernorm(x), cache, sliding, context)
        if self.config.post_norms:
            x = x + self.post_attention_layernorm(mixed)
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + mixed
            x = x + self.mlp(self.post_attention_layernorm(x))
        return split_tokens(x), new


class Transformer(nnx.Module):
    """Tokens to hidden states; `lm_head` is not applied here, so that logits need not exist.

    Args:
      config: shape of the decoder.
      key: random key of all weights.
    """

    def __init__(self, config: DecoderConfig, key: jax.Array):
        self.config = config
        names = InitKey(key)
        self.embed_tokens = Embed(
            config.vocab_size,
            config.width,
            key=names.child("embed_tokens"),
            dtype=config.dtype,
            param_dtype=config.param_dtype,
        )

        # A scan draws one layer at a time: in float32, before it is quantised.
        @nnx.scan(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def draw_layer(key: jax.Array) -> DecoderLayer:
            return DecoderLayer(config, InitKey(key, ("layers",), stacked=True))

        self.layers: DecoderLayer | nnx.List = draw_layer(jax.random.split(key, config.layers))
        self.norm = _norm(config)
        if not config.tie_embeddings:
            self.lm_head = Linear(
                config.width,
                config.vocab_size,
                ("embed", "vocab"),
                key=names.child("lm_head"),
                param_dtype=config.param_dtype,
            )

    def __call__(self, tokens: jax.Array, token_mask: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """Computes the hidden states of whole sequences.

        Args:
          tokens: [B, T] int32.
          token_mask: [B, T] bool, True at real tokens. Padding may be anywhere: it is never attended to, and its
            values reach nothing.
          positions: [B, T] int32; None counts the real tokens of the row.

        Returns:
          [B, T, D], finite but meaningless at padding.
        """
        return self._sequences(tokens, token_mask, positions)[0]

    def grouped(self, tokens: jax.Array, token_mask: jax.Array, *, prompt: int, group: int) -> jax.Array:
        """Computes the hidden states of completions of shared prompts; each prompt goes through the layers once.

        Args:
          tokens: [B, P + C] int32. The first P columns of each `group` consecutive rows are alike; those of the first
            row are read.
          token_mask: [B, P + C] bool, True at real tokens; alike in the same columns.
          prompt: P.
          group: a divisor of B.

        Returns:
          [B, P + C, D], equal to `__call__` of the same rows, up to rounding.
        """
        mask = shared_prompt_mask(token_mask, prompt, group, self.config.window)
        mask = SharedPromptMask(self._for_kernels(mask.prompt), self._for_kernels(mask.completion))
        inputs = (tokens, token_mask, token_positions(token_mask))
        packed_tokens, real, positions = (pack(x, prompt, group) for x in inputs)
        return unpack(self._run(packed_tokens, real, positions, mask)[0], prompt, group)

    def packed(self, tokens: jax.Array, token_mask: jax.Array, packed: PackedRows, *, prompt: int) -> jax.Array:
        """Computes the hidden states of packed rows; the layers do not pay for padding.

        Args:
          tokens: [B, P + C] int32, before packing.
          token_mask: [B, P + C] bool, True at real tokens.
          packed: their places.
          prompt: P.

        Returns:
          [B, P + C, D], equal to `__call__` of the same rows where a token of a completion follows, up to rounding; 0
          elsewhere.
        """
        mask = self._for_kernels(packed_mask(token_mask, packed, prompt, self.config.window))
        real, positions = pack_rows(token_mask, packed), packed_positions(token_mask, packed)
        states, _ = self._run(pack_rows(tokens, packed), real, positions, mask)
        return unpack_states(states, token_mask, packed, prompt)

    def prefill(
        self, tokens: jax.Array, token_mask: jax.Array, positions: jax.Array | None = None
    ) -> tuple[jax.Array, KeyValues]:
        """Computes hidden states as `__call__` does, and the keys and values [layers, B, T, K, H] for `decode`."""
        hidden, new = self._sequences(tokens, token_mask, positions, keep=True)
        assert isinstance(new, KeyValues)
        return hidden, new

    def decode(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache,
        token_mask: jax.Array,
        column: int | jax.Array,
        *,
        key_positions: jax.Array | None = None,
        rope: RopeTables | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Computes one more token per row.

        Args:
          tokens: [B] int32, in column `column` of the sequences.
          positions: [B] int32, the tokens' positions in their rows.
          cache: filled where `token_mask` is True except at `column`; a stack of layers, or a list of them if the
            layers are `unrolled`.
          token_mask: [B, S] bool, the columns that the token attends to, itself included; a sliding layer attends to
            the last ones of these. The hidden state of a row without any is meaningless.
          column: int32, a scalar, after the columns of the prompts.
          key_positions: [B, S] int32, the positions of the columns in their rows; None: columns are in order.
          rope: `rope_tables` of `positions`, if already known.

        Returns:
          Hidden states [B, D], and the cache with `column` filled.
        """
        mask = cache_mask(token_mask, self.config.window, positions, key_positions)
        real = jnp.any(token_mask, axis=-1, keepdims=True)
        hidden, new = self._run(
            tokens[:, None], real, positions[:, None], mask, cache=cache, column=column, keep=True, rope=rope
        )
        return hidden[:, 0], cast(Cache, new)

    def unrolled(self) -> "Transformer":
        """Returns the same decoder with a list of layers, for `decode`: no loop, and no copy of a layer out of a stack.

        The program then grows with the depth. Layers that are read in pieces stay in the stack.
        """
        if any(in_pieces(x) for x in jax.tree.leaves(self.layers)):
            return self
        copy = jax.tree.map(lambda x: x, self)
        copy.layers = nnx.List(
            [jax.tree.map(lambda x, layer=layer: x[layer], self.layers) for layer in range(self.config.layers)]
        )
        return copy

    def _sequences(
        self,
        tokens: jax.Array,
        token_mask: jax.Array,
        positions: jax.Array | None,
        *,
        keep: bool = False,
    ) -> tuple[jax.Array, KeyValues | Cache | None]:
        mask = self._for_kernels(causal_mask(token_mask, self.config.window))
        if positions is None:
            positions = token_positions(token_mask)
        return self._run(tokens, token_mask, positions, mask, keep=keep)

    def _for_kernels(self, mask: AttentionMask) -> AttentionMask:
        """Drops the segments that kernels read if the config wants no kernel."""
        return dataclasses.replace(mask, segments=None) if self.config.attention == "xla" else mask

    def _run(
        self,
        tokens: jax.Array,
        real: jax.Array,
        positions: jax.Array,
        mask: AttentionMask | SharedPromptMask,
        *,
        cache: Cache | None = None,
        column: int | jax.Array = 0,
        keep: bool = False,
        rope: RopeTables | None = None,
    ) -> tuple[jax.Array, KeyValues | Cache | None]:
        """Computes hidden states [B, T, D] after the last norm, and the cache, or the keys and values if `keep`."""
        config = self.config
        x = self.embed_tokens(tokens)
        if config.embed_scale is not None:
            x = x * jnp.asarray(config.embed_scale, x.dtype)
        # Drops padding values, NaN included: attention weights of 0 would not.
        x = split_tokens(jnp.where(real[..., None], x, 0))
        rope = rope_tables(config, positions, x.dtype) if rope is None else rope
        context = LayerContext(mask, rope, column)
        new: Any
        if isinstance(cache, Sequence):
            new = []
            for number, (kind, layer_cache) in enumerate(zip(config.kinds, cache, strict=True)):
                unrolled = isinstance(self.layers, nnx.List)
                layer = self.layers[number] if unrolled else nth_layer(self.layers, number, after=x)
                x, written = layer(x, layer_cache, kind == "sliding", context)
                new.append(written)
        elif cache is None:
            x, new = self._scan(x, context, keep)
        else:
            assert isinstance(cache, GroupCache)
            x, new = self._scan_cache(x, cache, context)
        return self.norm(x), new

    def _scan(self, x: jax.Array, context: LayerContext, keep: bool) -> tuple[jax.Array, KeyValues | None]:
        weights, layer_at = scanned_layers(self.layers)

        def run_layer(part: Any, x: jax.Array, *args: Any) -> tuple[jax.Array, KeyValues | None]:
            x, new = layer_at(part)(x, None, *args)
            assert isinstance(new, KeyValues)
            return x, new if keep else None

        # With "full", memory grows by one [B, T, D] a layer. Inside a scan nothing can be shared between the two passes
        # anyway, so CSE needs no barrier.
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if self.config.remat == "dots" else None
        rematerialised = jax.checkpoint(run_layer, prevent_cse=False, policy=policy)
        stacked = (weights, self._sliding())
        return jax.lax.scan(lambda x, of_layer: rematerialised(of_layer[0], x, of_layer[1], context), x, stacked)

    def _scan_cache(self, x: jax.Array, cache: GroupCache, context: LayerContext) -> tuple[jax.Array, GroupCache]:
        """Runs the layers on one token per row; every layer writes its part of the stack in place."""
        weights, layer_at = scanned_layers(self.layers)

        def run_layer(carry: tuple[jax.Array, SlotCache], of_layer: Any) -> tuple[tuple[jax.Array, SlotCache], None]:
            (x, completions), (part, number, sliding) = carry, of_layer
            layer: Any = layer_at(part)
            x, written = layer(x, StackedLayer(GroupCache(cache.prompts, completions), number), sliding, context)
            return (x, written.stack.completions), None

        stacked = (weights, jnp.arange(self.config.layers), self._sliding())
        (x, completions), _ = jax.lax.scan(run_layer, (x, cache.completions), stacked)
        return x, GroupCache(cache.prompts, completions)

    def _sliding(self) -> jax.Array | None:
        """Says which layers are sliding ones; None if all are alike."""
        kinds = self.config.kinds
        return jnp.array([kind == "sliding" for kind in kinds]) if len(set(kinds)) > 1 else None
