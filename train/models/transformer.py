"""The decoder's modules, named as in Hugging Face checkpoints.

Shapes: B rows, T tokens, K key-value heads, H head width, D model width. Layers with the same parameters are one
`DecoderLayer` whose parameters have a leading axis: a scan goes through them, so that neither the program nor the time
to compile it grows with the depth.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.models.attention.spans import RESULTS, Spans, row_spans, token_positions
from train.models.blocks import DecoderLayer, LayerStack, layer_segments, layer_stacks
from train.models.cache import DecoderState, PromptState, cache_mask
from train.models.config import DecoderConfig
from train.models.experts import Routed
from train.models.layers import Embed, InitKey, Linear, in_pieces, norm, nth_layer, scanned_layers
from train.models.projections import keep_joined
from train.models.rope import RopeTables, rope_tables
from train.models.self_attention import LayerContext
from train.models.sharding import split_tokens

LayerRunner: TypeAlias = Callable[..., tuple[jax.Array, Any, Routed | None]]


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
        shared = stacks.get(("layers",))
        self.layers: Any = nnx.Dict({path[-1]: layers for path, layers in stacks.items()}) if shared is None else shared
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
        return self.routed(tokens, token_mask, positions)[0]

    def routed(
        self,
        tokens: jax.Array,
        token_mask: jax.Array,
        positions: jax.Array | None = None,
        *,
        routes: jax.Array | None = None,
    ) -> tuple[jax.Array, Routed | None]:
        """Computes hidden states as `__call__` does with routes, and tells what the routers did.

        Args:
          tokens: [B, T] int32.
          token_mask: [B, T] bool.
          positions: [B, T] int32, or None.
          routes: [B, T, L, k] int, the experts of each token in the L layers that have some; a token with -1 in a layer
            chooses for itself there. None: all tokens do.

        Returns:
          [B, T, D], and `Routed` with arrays [B, T, L, ...]; None for a decoder without experts.
        """
        hidden, _, routed = self._sequences(tokens, token_mask, positions, routes=routes)
        return hidden, routed

    def run(
        self,
        tokens: jax.Array,
        real: jax.Array,
        positions: jax.Array,
        spans: Spans,
        *,
        routes: jax.Array | None = None,
    ) -> tuple[jax.Array, Routed | None]:
        """Computes the hidden states of slots, each after what its span lets it attend to.

        Args:
          tokens: [R, W] int32.
          real: [R, W] bool, True at slots with a token; the values of others reach nothing.
          positions: [R, W] int32, of each token in its sequence.
          spans: what each slot attends to.
          routes: [R, W, L, k] int, as in `routed`.

        Returns:
          [R, W, D], finite but meaningless at slots without a token; and `Routed` with arrays [R, W, L, ...], None for
          a decoder without experts.
        """
        hidden, _, routed = self._run(tokens, real, positions, spans, routes=routes)
        return hidden, routed

    def prefill(
        self, tokens: jax.Array, token_mask: jax.Array
    ) -> tuple[jax.Array, tuple[PromptState, ...], Routed | None]:
        """Computes what `routed` does, and between its results what each stack of layers keeps for `decode`."""
        return self._sequences(tokens, token_mask, None, keep=True)

    def decode(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        state: DecoderState,
        token_mask: jax.Array,
        column: int | jax.Array,
        *,
        key_positions: jax.Array | None = None,
        rope: RopeTables | None = None,
    ) -> tuple[jax.Array, DecoderState, Routed | None]:
        """Computes one more token per row.

        Args:
          tokens: [B] int32, in column `column` of the sequences.
          positions: [B] int32, the tokens' positions in their rows.
          state: of the earlier tokens, where `token_mask` is True except at `column`; unrolled if the layers are
            `unrolled`.
          token_mask: [B, S] bool, the columns that the token attends to, itself included; a sliding layer attends to
            the last ones of these. The hidden state of a row without any is meaningless.
          column: int32, a scalar, after the columns of the prompts.
          key_positions: [B, S] int32, the positions of the columns in their rows; None: columns are in order.
          rope: `rope_tables` of `positions`, if already known.

        Returns:
          Hidden states [B, D], the state with the token in `column`, and what the routers did, with arrays [B, L, ...];
          None for a decoder without experts.
        """
        mask = cache_mask(token_mask, self.config.sliding_window, positions, key_positions)
        real = jnp.any(token_mask, axis=-1, keepdims=True)
        x = self._embed(tokens[:, None], real)
        rope = rope_tables(self.config, positions[:, None], x.dtype) if rope is None else rope
        context = LayerContext(mask, real, rope, column)
        run = self._decode_layers if state.unrolled else self._scan_state
        x, new, routed = run(x, state, context)
        routed = jax.tree.map(lambda array: array[:, 0], routed)
        return self.norm(x)[:, 0], dataclasses.replace(state, stacks=new), routed

    def extend(
        self, tokens: jax.Array, positions: jax.Array, real: jax.Array, state: DecoderState, keys: Any
    ) -> tuple[jax.Array, DecoderState]:
        """Computes tokens that continue rows whose earlier tokens are in caches; for `unrolled` layers.

        Args:
          tokens: [B, T] int32.
          positions: [B, T] int32, of each token in its row.
          real: [B, T] bool; the values of other tokens reach nothing.
          state: a `LayerCache` for each layer, that takes T tokens.
          keys: the mask that these caches read.

        Returns:
          Hidden states [B, T, D], and the caches with the new keys and values.
        """
        x = self._embed(tokens, real)
        context = LayerContext(keys, real, rope_tables(self.config, positions, x.dtype))
        x, new, _ = self._decode_layers(x, state, context)
        return self.norm(x), dataclasses.replace(state, stacks=new)

    def unrolled(self) -> "Transformer":
        """Returns the same decoder with a list of layers, for `decode`: no loop, and no copy of a layer out of a stack.

        The program then grows with the depth. Layers that are read in pieces stay in the stack. Weights that `project`
        joins are joined here, before the loop of decode steps.
        """
        if any(in_pieces(x) for x in jax.tree.leaves(self.layers)):
            return self
        copy = jax.tree.map(lambda x: x, self)
        copy.layers = nnx.List(
            [
                jax.tree.map(lambda x, index=index: x[index], self._stack(layer_stacks(self.config)[number]))
                for number, index in self._stack_indices()
            ]
        )
        for _, module in nnx.iter_modules(copy.layers):
            for linears in getattr(module, "projection_groups", tuple)():
                keep_joined(linears, jnp.dtype(self.config.dtype))
        return copy

    def _sequences(
        self,
        tokens: jax.Array,
        token_mask: jax.Array,
        positions: jax.Array | None,
        *,
        keep: bool = False,
        routes: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[PromptState, ...], Routed | None]:
        if positions is None:
            positions = token_positions(token_mask)
        spans = row_spans(token_mask, self.config.sliding_window)
        return self._run(tokens, token_mask, positions, spans, keep=keep, routes=routes)

    def _run(
        self,
        tokens: jax.Array,
        real: jax.Array,
        positions: jax.Array,
        spans: Spans,
        *,
        keep: bool = False,
        routes: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[PromptState, ...], Routed | None]:
        """Computes hidden states [B, T, D] after the last norm, and what each stack keeps, nothing unless `keep`.

        Routes [B, T, L, k] go in, and `Routed` with arrays [B, T, L, ...] comes out.
        """
        x = self._embed(tokens, real)
        context = LayerContext(spans, real, rope_tables(self.config, positions, x.dtype))
        x, new, routed = self._scan(x, context, keep, None if routes is None else jnp.moveaxis(routes, 2, 0))
        return self.norm(x), new, routed

    def _embed(self, tokens: jax.Array, real: jax.Array) -> jax.Array:
        """Computes the inputs [B, T, D] of the first layer."""
        x = self.embed_tokens(tokens)
        if self.config.constant_embedding is not None:
            x = jnp.where((tokens == self.config.constant_embedding)[..., None], jax.lax.stop_gradient(x), x)
        if self.config.embed_scale is not None:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        # Drops padding values, NaN included: attention weights of 0 would not.
        return split_tokens(jnp.where(real[..., None], x, 0))

    def _decode_layers(
        self, x: jax.Array, state: DecoderState, context: LayerContext
    ) -> tuple[jax.Array, tuple[list[Any], ...], Routed | None]:
        """Runs the layers on one token per row, each with a state of its own."""
        new: tuple[list[Any], ...] = tuple([] for _ in state.stacks)
        routed = list[Routed]()
        unrolled = isinstance(self.layers, nnx.List)
        for layer_number, (number, index) in enumerate(self._stack_indices()):
            stack = layer_stacks(self.config)[number]
            layer = self.layers[layer_number] if unrolled else nth_layer(self._stack(stack), index, after=x)
            sliding = self.config.kinds[layer_number].attention == "sliding"
            x, written, of_router = layer(x, state.stacks[number][index], sliding, context)
            new[number].append(written)
            routed += [] if of_router is None else [of_router]
        return x, new, jax.tree.map(lambda *arrays: jnp.stack(arrays, 2), *routed) if routed else None

    def _scan(
        self, x: jax.Array, context: LayerContext, keep: bool, routes: jax.Array | None
    ) -> tuple[jax.Array, tuple[PromptState, ...], Routed | None]:
        """Runs the layers on whole rows, with routes [L, B, T, k]."""
        # With "full", memory grows by one [B, T, D] a layer. Inside a scan nothing can be shared between the two passes
        # anyway, so CSE needs no barrier.
        policy = None
        if self.config.remat == "dots":
            policies = jax.checkpoint_policies
            attention = policies.save_only_these_names(RESULTS)
            policy = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, attention)

        def layer_runner(run: LayerRunner) -> LayerRunner:
            def run_layer(part: Any, x: jax.Array, *args: Any) -> tuple[jax.Array, Any, Routed | None]:
                x, new, of_router = run(part, x, None, *args)
                return x, new if keep else None, of_router

            return jax.checkpoint(run_layer, prevent_cse=False, policy=policy)

        prompt_states = list[PromptState]()
        routed = list[Routed | None]()
        for segment in layer_segments(self.config):
            runs, inputs = zip(*map(self._scanned, segment), strict=True)
            rematerialised = [layer_runner(run) for run in runs]

            def run_repeat(x: jax.Array, of_layers: Any, runs: Any = rematerialised) -> tuple[jax.Array, list[Any]]:
                results = []
                for run, (part, sliding), replayed in zip(runs, *of_layers, strict=True):
                    x, *result = run(part, x, sliding, dataclasses.replace(context, routes=replayed))
                    results.append(result)
                return x, results

            x, results = jax.lax.scan(run_repeat, x, (inputs, [self._of_stack(routes, stack) for stack in segment]))
            prompt_states += [new for new, _ in results]
            routed += [of_router for _, of_router in results]
        return x, tuple(prompt_states) if keep else (), self._in_layer_order(routed)

    def _scan_state(
        self, x: jax.Array, state: DecoderState, context: LayerContext
    ) -> tuple[jax.Array, tuple[Any, ...], Routed | None]:
        """Runs the layers on one token per row; every layer writes its part of the stack in place."""
        stacks = iter(state.stacks)
        new = list[Any]()
        routed = list[Routed | None]()
        for segment in layer_segments(self.config):
            runs, inputs = zip(*map(self._scanned, segment), strict=True)

            def run_repeat(carry: Any, of_layers: Any, runs: Any = runs) -> tuple[Any, list[Routed | None]]:
                x, states = carry
                number, inputs = of_layers
                written = []
                of_routers = []
                for run, stack, (part, sliding) in zip(runs, states, inputs, strict=True):
                    x, layer, of_router = run(part, x, stack.at_layer(number), sliding, context)
                    written.append(layer.stack)
                    of_routers.append(of_router)
                return (x, written), of_routers

            states = [next(stacks) for _ in segment]
            numbers = jnp.arange(len(segment[0].layers))
            (x, written), of_routers = jax.lax.scan(run_repeat, (x, states), (numbers, inputs))
            new += written
            routed += of_routers
        return x, tuple(new), self._in_layer_order(routed)

    def _of_stack(self, routes: jax.Array | None, stack: LayerStack) -> jax.Array | None:
        """Selects a stack's layers from the routes of all layers with experts, [L, ...]."""
        numbers = self.config.expert_layers
        if routes is None or stack.layers[0] not in numbers:
            return None
        return routes[np.array([numbers.index(layer) for layer in stack.layers])]

    def _in_layer_order(self, routed: list[Routed | None]) -> Routed | None:
        """Joins what the routers of each stack did, [layers, B, T, ...], to [B, T, L, ...]."""
        stacks = [stack for stack in layer_stacks(self.config) if stack.layers[0] in self.config.expert_layers]
        if not stacks:
            return None
        order = np.argsort(np.concatenate([list(stack.layers) for stack in stacks]))
        parts = [of_router for of_router in routed if of_router is not None]
        return jax.tree.map(lambda *arrays: jnp.moveaxis(jnp.concatenate(arrays)[order], 0, 2), *parts)

    def _stack(self, stack: LayerStack) -> DecoderLayer:
        """Returns the module whose parameters are the stack."""
        return cast(DecoderLayer, self.layers if stack.path == ("layers",) else self.layers[stack.path[-1]])

    def _stack_indices(self) -> list[tuple[int, int]]:
        """Lists for every layer the number of its stack in `layer_stacks`, and its index in that stack."""
        indices = {
            layer: (number, index)
            for number, stack in enumerate(layer_stacks(self.config))
            for index, layer in enumerate(stack.layers)
        }
        return [indices[layer] for layer in range(self.config.layers)]

    def _scanned(self, stack: LayerStack) -> tuple[LayerRunner, tuple[Any, jax.Array | None]]:
        """Prepares a stack for a scan: the function that runs one of its layers, and the inputs of the scan.

        The second input says which layers are sliding ones; it is None if all are alike.
        """
        weights, layer_at = scanned_layers(self._stack(stack))
        sliding = [kind.attention == "sliding" for kind in stack.of_layers(self.config.kinds)]

        def run(part: Any, x: jax.Array, state: Any, traced: jax.Array | None, context: LayerContext) -> Any:
            return layer_at(part)(x, state, sliding[0] if traced is None else traced, context)

        return run, (weights, jnp.array(sliding) if len(set(sliding)) > 1 else None)


def _draw_stack(config: DecoderConfig, stack: LayerStack, keys: jax.Array) -> DecoderLayer:
    """Draws the layers of a stack with their keys, of all layers; a scan draws one layer at a time.

    Each is drawn in float32, before it is quantised.
    """

    @nnx.scan(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def draw_layer(key: jax.Array) -> DecoderLayer:
        return DecoderLayer(config, config.kinds[stack.layers[0]], InitKey(key, ("layers",), stacked=True))

    return cast(DecoderLayer, draw_layer(stack.of_layers(keys)))
