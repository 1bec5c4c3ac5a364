"""The layers of a decoder: the tables of attention and MLP kinds, and the stacks that scans go through."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, Protocol

import jax
from flax import nnx

from train.models.config import AttentionKind, DecoderConfig, LayerKind, MlpKind, shortest_period
from train.models.experts import ExpertMlp, Routed
from train.models.fused.norms import fork
from train.models.layers import InitKey, Linear, RMSNorm, norm
from train.models.mlp import DenseMlp
from train.models.projections import room
from train.models.self_attention import LayerContext, SelfAttention
from train.models.sharding import split_tokens


class Mlp(Protocol):
    """A kind of MLP. Its parameters may have any shapes; `train.models.sharding.RULES` has their logical axes."""

    def __init__(self, config: DecoderConfig, key: InitKey) -> None:
        """Draws the parameters of one layer."""

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, Routed | None]:
        """Computes [B, T, D] of [B, T, D], each token alone; the values of padding are arbitrary, but finite.

        Returns:
          [B, T, D], and what a router did; None of an MLP without one.
        """


class Mixer(Protocol):
    """A kind of attention, or of another layer through which a token depends on earlier tokens.

    Attributes:
      rows_may_join: whether `LayerContext.keys` alone says which tokens a token depends on, so that rows can be packed
        and share prompts.
    """

    rows_may_join: ClassVar[bool]

    def __init__(self, config: DecoderConfig, key: InitKey) -> None:
        """Draws the parameters of one layer."""

    def __call__(
        self, x: jax.Array, state: Any, sliding: bool | jax.Array, context: LayerContext
    ) -> tuple[jax.Array, Any]:
        """Computes [B, T, D] of [B, T, D].

        Args:
          x: [B, T, D], finite at padding, which no real token may depend on.
          state: one layer of a `LayerState`, with the tokens before; None: x are whole sequences.
          sliding: whether this is a sliding layer, may be traced.
          context: inputs that all layers share.

        Returns:
          [B, T, D], and the state with x; of whole sequences one layer of a `PromptState`.
        """

    @staticmethod
    def state_bytes(config: DecoderConfig, tokens: int) -> int:
        """Counts the bytes of one layer's state of a number of tokens, on all devices together."""


# Kinds with one class have the same parameters: whether a layer is a sliding one is an input of the scan.
ATTENTIONS: Mapping[AttentionKind, type[Mixer]] = {"full": SelfAttention, "sliding": SelfAttention}
MLPS: Mapping[MlpKind, type[Mlp]] = {"dense": DenseMlp, "experts": ExpertMlp}


class DecoderLayer(nnx.Module):
    """Attention and MLP, each with its norms and its residual connection."""

    def __init__(self, config: DecoderConfig, kind: LayerKind, key: InitKey):
        self.config = config
        self.input_layernorm = norm(config)
        self.self_attn = ATTENTIONS[kind.attention](config, key.child("self_attn"))
        self.post_attention_layernorm = norm(config)
        if config.post_norms:
            self.pre_feedforward_layernorm = norm(config)
            self.post_feedforward_layernorm = norm(config)
        self.mlp = MLPS[kind.mlp](config, key.child("mlp"))

    def __call__(
        self, x: jax.Array, state: Any, sliding: bool | jax.Array, context: LayerContext
    ) -> tuple[jax.Array, Any, Routed | None]:
        """Returns the output [B, T, D], the layer's state and what its router did; see `Mixer` and `Mlp`."""

        def fork_before(block: Mixer | Mlp, norm: RMSNorm, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            if state is not None or self.config.attention == "xla":
                return norm(x), x
            groups: tuple[tuple[Linear, ...], ...] = getattr(block, "projection_groups", tuple)()
            return fork(norm, x, room=room(x, groups[0]) if groups else 0)

        normed, x = fork_before(self.self_attn, self.input_layernorm, x)
        mixed, new = self.self_attn(normed, state, sliding, context)
        if self.config.post_norms:
            normed, x = fork_before(self.mlp, self.pre_feedforward_layernorm, x + self.post_attention_layernorm(mixed))
            y, routed = self.mlp(normed, context)
            y = self.post_feedforward_layernorm(y)
        else:
            normed, x = fork_before(self.mlp, self.post_attention_layernorm, x + mixed)
            y, routed = self.mlp(normed, context)
        return split_tokens(x + y), new, routed


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """Layers with parameters of the same names and shapes, stacked along a leading axis.

    Attributes:
      path: of the stack in the parameter tree.
      layers: numbers of its layers in the decoder.
    """

    path: tuple[str, ...]
    layers: range

    def of_layers(self, x: Any) -> Any:
        """Selects the entries of these layers from an array or a sequence with an entry for every layer."""
        return x[self.layers.start : self.layers.stop : self.layers.step]


Segment = tuple[LayerStack, ...]
"""Stacks of equal depth whose layers take turns: a scan runs one layer of each, then the next of each."""


@functools.cache
def layer_segments(config: DecoderConfig) -> tuple[Segment, ...]:
    """Lists the scans that run the layers, in order.

    A decoder whose layers all have the same parameters is one scan of one stack, at the path "layers". Otherwise the
    shortest pattern of parameters that repeats is one scan, and each run of equal layers after it another. No two scans
    share a stack: a scan would copy its part of the weights out of it.
    """
    parts = [(ATTENTIONS[kind.attention], MLPS[kind.mlp]) for kind in config.kinds]
    depth = len(parts)
    period = shortest_period(parts)
    repeated = depth // period * period if depth >= 2 * period else 0
    scans = [[range(first, repeated, period) for first in range(period)]] if repeated else []
    scans += [[layers] for layers in _runs(parts, repeated)]
    if len(scans) == len(scans[0]) == 1:
        return ((LayerStack(("layers",), scans[0][0]),),)
    return tuple(
        tuple(LayerStack(("layers", f"{config.kinds[layers.start].mlp}_{layers.start}"), layers) for layers in scan)
        for scan in scans
    )


def layer_stacks(config: DecoderConfig) -> tuple[LayerStack, ...]:
    """Lists the stacks of all layers."""
    return tuple(stack for segment in layer_segments(config) for stack in segment)


def split_path(config: DecoderConfig, path: tuple[str, ...]) -> tuple[LayerStack | None, tuple[str, ...]]:
    """Splits the path of a leaf into its stack, None outside of the layers, and its path within a layer."""
    stack = next((stack for stack in layer_stacks(config) if path[: len(stack.path)] == stack.path), None)
    return stack, path if stack is None else path[len(stack.path) :]


def state_bytes(config: DecoderConfig, tokens: int) -> int:
    """Counts the bytes of what all layers keep of a number of tokens, on all devices together."""
    return sum(ATTENTIONS[kind.attention].state_bytes(config, tokens) for kind in config.kinds)


def check_rows_may_join(config: DecoderConfig) -> None:
    """Raises ValueError if a layer cannot run rows that hold several sequences."""
    alone = sorted({kind.attention for kind in config.kinds if not ATTENTIONS[kind.attention].rows_may_join})
    if alone:
        raise ValueError(
            f"optim.packing and optim.share_prompts: expected false for a model with {' and '.join(alone)} layers, "
            "whose rows run one by one"
        )


def _runs(parts: Sequence[Any], first: int) -> Iterator[range]:
    """Yields the runs of equal entries from `first` on."""
    for _, run in groupby(range(first, len(parts)), key=parts.__getitem__):
        layers = list(run)
        yield range(layers[0], layers[-1] + 1)
