"""The decoder's modules, named as in Hugging Face checkpoints.

Shapes: B rows, T tokens, K key-value heads, H head width, D model width. Layers with the same parameters are one
`DecoderLayer` whose parameters have a leading axis: a scan goes through them, so that neither the program nor the time
to compile it grows with the depth.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx

from train.models.attention import AttentionMask, cache_mask, causal_mask, token_positions
from train.models.blocks import DecoderLayer, LayerStack, layer_segments, layer_stacks
from train.models.cache import GroupCache, KeyValues, LayerCache, SlotCache, StackedLayer
from train.models.config import DecoderConfig
from train.models.layers import Embed, InitKey, Linear, in_pieces, norm, nth_layer, scanned_layers
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
from train.models.rope import RopeTables, rope_tables
from train.models.self_attention import LayerContext
from train.models.sharding import split_tokens

Cache: TypeAlias = GroupCache | Sequence[GroupCache]
LayerRunner: TypeAlias = Callable[..., tuple[jax.Array, Any]]


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

        keys = jax.random.split(key, config.layers)
        stacks = {stack.path: _draw_stack(config, stack, keys) for stack in layer_stacks(config)}
        whole = stacks.get(("layers",))
        self.layers: Any = nnx.Dict({path[-1]: layers for path, layers in stacks.items()}) if whole is None else whole
        self.norm = norm(config)
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
        mask = shared_prompt_mask(token_mask, prompt, group, self.config.sliding_window)
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
        mask = self._for_kernels(packed_mask(token_mask, packed, prompt, self.config.sliding_window))
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
        mask = cache_mask(token_mask, self.config.sliding_window, positions, key_positions)
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
            [jax.tree.map(lambda x, index=index: x[index], self._stack(stack)) for stack, index in self._places()]
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
        mask = self._for_kernels(causal_mask(token_mask, self.config.sliding_window))
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
            unrolled = isinstance(self.layers, nnx.List)
            for number, (stack, index) in enumerate(self._places()):
                layer = self.layers[number] if unrolled else nth_layer(self._stack(stack), index, after=x)
                x, written = layer(x, cache[number], config.kinds[number].attention == "sliding", context)
                new.append(written)
        elif cache is None:
            x, new = self._scan(x, context, keep)
        else:
            assert isinstance(cache, GroupCache)
            x, new = self._scan_cache(x, cache, context)
        return self.norm(x), new

    def _scan(self, x: jax.Array, context: LayerContext, keep: bool) -> tuple[jax.Array, KeyValues | None]:
        # With "full", memory grows by one [B, T, D] a layer. Inside a scan nothing can be shared between the two passes
        # anyway, so CSE needs no barrier.
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if self.config.remat == "dots" else None

        def layer_runner(run: LayerRunner) -> LayerRunner:
            def run_layer(part: Any, x: jax.Array, *args: Any) -> tuple[jax.Array, KeyValues | None]:
                x, new = run(part, x, None, *args)
                assert isinstance(new, KeyValues)
                return x, new if keep else None

            return jax.checkpoint(run_layer, prevent_cse=False, policy=policy)

        kept = []
        for segment in layer_segments(self.config):
            runs, inputs = zip(*map(self._scanned, segment), strict=True)
            rematerialised = [layer_runner(run) for run in runs]

            def run_repeat(x: jax.Array, of_layers: Any, runs: Any = rematerialised) -> tuple[jax.Array, list[Any]]:
                news = []
                for run, (part, sliding) in zip(runs, of_layers, strict=True):
                    x, new = run(part, x, sliding, context)
                    news.append(new)
                return x, news

            x, news = jax.lax.scan(run_repeat, x, inputs)
            kept.append(news)
        return x, _in_order(kept) if keep else None

    def _scan_cache(self, x: jax.Array, cache: GroupCache, context: LayerContext) -> tuple[jax.Array, GroupCache]:
        """Runs the layers on one token per row; every layer writes its part of the stack in place."""
        carry = x, cache.completions
        for segment in layer_segments(self.config):
            runs, inputs = zip(*map(self._scanned, segment), strict=True)

            def run_repeat(
                carry: tuple[jax.Array, SlotCache], of_layers: Any, runs: Any = runs
            ) -> tuple[tuple[jax.Array, SlotCache], None]:
                x, completions = carry
                for run, (part, number, sliding) in zip(runs, of_layers, strict=True):
                    layer_cache = StackedLayer(GroupCache(cache.prompts, completions), number)
                    x, written = run(part, x, layer_cache, sliding, context)
                    completions = written.stack.completions
                return (x, completions), None

            numbers = jnp.arange(self.config.layers)
            numbered = [
                (part, stack.of_layers(numbers), sliding)
                for stack, (part, sliding) in zip(segment, inputs, strict=True)
            ]
            carry, _ = jax.lax.scan(run_repeat, carry, numbered)
        return carry[0], GroupCache(cache.prompts, carry[1])

    def _stack(self, stack: LayerStack) -> DecoderLayer:
        """Returns the module whose parameters are the stack."""
        return cast(DecoderLayer, self.layers if stack.path == ("layers",) else self.layers[stack.path[-1]])

    def _places(self) -> list[tuple[LayerStack, int]]:
        """Lists the stack of every layer, and its index there."""
        places = {
            layer: (stack, index) for stack in layer_stacks(self.config) for index, layer in enumerate(stack.layers)
        }
        return [places[layer] for layer in range(self.config.layers)]

    def _scanned(self, stack: LayerStack) -> tuple[LayerRunner, tuple[Any, jax.Array | None]]:
        """Prepares a stack for a scan: the function that runs one of its layers, and the inputs of the scan.

        The second input says which layers are sliding ones; it is None if all are alike.
        """
        weights, layer_at = scanned_layers(self._stack(stack))
        sliding = [kind.attention == "sliding" for kind in stack.of_layers(self.config.kinds)]

        def run(
            part: Any, x: jax.Array, cache: LayerCache | None, traced: jax.Array | None, context: LayerContext
        ) -> Any:
            return layer_at(part)(x, cache, sliding[0] if traced is None else traced, context)

        return run, (weights, jnp.array(sliding) if len(set(sliding)) > 1 else None)


def _draw_stack(config: DecoderConfig, stack: LayerStack, keys: jax.Array) -> DecoderLayer:
    """Draws the layers of a stack with their keys, of all layers; a scan draws one layer at a time.

    Each is drawn in float32, before it is quantised.
    """

    @nnx.scan(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def draw_layer(key: jax.Array) -> DecoderLayer:
        return DecoderLayer(config, config.kinds[stack.layers[0]], InitKey(key, ("layers",), stacked=True))

    return cast(DecoderLayer, draw_layer(stack.of_layers(keys)))


def _in_order(kept: list[list[KeyValues]]) -> KeyValues:
    """Joins the keys and values that scans leave, one list of stacks for each, to one stack of all layers."""

    def interleave(*stacks: jax.Array) -> jax.Array:
        return jnp.stack(stacks, axis=1).reshape(-1, *stacks[0].shape[1:]) if len(stacks) > 1 else stacks[0]

    joined = [jax.tree.map(interleave, *stacks) for stacks in kept]
    return joined[0] if len(joined) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *joined)
