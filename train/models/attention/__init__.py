"""Attention of whole rows behind one function, `attend`; the devices, the shape and the type choose how it is computed.

| implementation | devices | rows |
|---|---|---|
| `tpu` | TPUs | all |
| `cudnn` | NVIDIA GPUs | one sequence a row; prompts that a fixed number of completions share |
| `triton` | NVIDIA GPUs | all others |
| `blocks` | all | all |
| `dense` | all | short, where loops cost more than they leave out |

Shapes: R rows, W slots, N query heads, K key-value heads, H head width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from train.models.attention.blocks import CPU_BLOCK, attend_in_blocks
from train.models.attention.cudnn import cudnn_groups, cudnn_rows, split_groups
from train.models.attention.dense import attend_densely
from train.models.attention.spans import Spans
from train.models.attention.tpu import LANES, tpu_attention
from train.models.attention.triton import BLOCK, triton_attention
from train.models.sharding import axis_index, axis_size, device_kind, divides, split_by_hand

Implementation: TypeAlias = Literal["tpu", "cudnn", "triton", "blocks", "dense"]
DENSE_WIDTH = 192
"""Slots of a row, at most, that is computed densely without a kernel: two blocks cost more than they leave out."""
_BY_BLOCKS: dict[str, tuple[Callable[..., jax.Array], int]] = {
    "tpu": (tpu_attention, LANES),
    "triton": (triton_attention, BLOCK),
    "blocks": (attend_in_blocks, CPU_BLOCK),
}
"""Functions of whole blocks, and the slots of a block."""
_QUERIES = ("rows", "tokens", "heads", None)
_KEYS = ("rows", None, "kv_heads", None)


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How scores are computed.

    Attributes:
      sliding: whether this is a sliding layer, also as a traced scalar.
      scale: factor of the scores; None: `H ** -0.5`.
      softcap: scores z become `softcap * tanh(z / softcap)`; None: unchanged.
      sinks: [N] float, a score of each head that no key has and no value follows: its share of the softmax is lost.
        None: there is none.
      kernels: whether a kernel of the device may compute it.
      implementation: what computes it, of those that take these devices and rows; None: `choose_implementation` says.
    """

    sliding: bool | jax.Array = False
    scale: float | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None
    kernels: bool = True
    implementation: Implementation | None = None


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    spans: Spans,
    options: AttentionOptions = AttentionOptions(),
) -> jax.Array:
    """Computes grouped-query attention [R, W, N, H] of slots to the slots of their span.

    Args:
      query: [R, W, N, H].
      key: [R, W, K, H] with N a multiple of K, finite also at padding.
      value: [R, W, K, H], finite also at padding.
      spans: the keys of each slot.
      options: layer kind, scale, softcap and sinks.

    Returns:
      [R, W, N, H] in the type of the queries; finite but meaningless at padding.
    """
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    implementation = options.implementation or choose_implementation(query, key, spans, options)
    start = spans.for_layer(options.sliding)
    computed: dict[str, Any] = {"scale": scale, "softcap": options.softcap}
    if implementation == "dense":
        # Slices would gather a split axis of tokens.
        computed |= {"sinks": options.sinks, "split": axis_size("tokens") == 1}
        return attend_densely(query, key, value, spans.end, start, **computed)
    if implementation == "cudnn":
        if spans.lengths is not None:
            return cudnn_rows(query, key, value, spans, options.sliding, scale=scale)
        assert spans.group is not None
        groups = split_groups(query, key, value, spans.group)
        first, later = cudnn_groups(groups, spans, options.sliding, scale=scale)
        return jnp.concatenate([first, later.reshape(len(first), -1, *later.shape[2:])], axis=1)
    function, block = _BY_BLOCKS[implementation]
    return _over_mesh(function, query, key, value, spans.end, start, options.sinks, block=block, **computed)


def choose_implementation(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    spans: Spans,
    options: AttentionOptions = AttentionOptions(),
) -> Implementation:
    """Chooses how the devices of this mesh compute `attend`, by the shapes and the types alone."""
    kind = device_kind()
    head_dim = query.shape[3]
    width = key.shape[1]
    split = {"rows": len(query), "heads": query.shape[2], "kv_heads": key.shape[2], "tokens": width}
    if not all(divides(size, axis) for axis, size in split.items()):
        return "dense"
    if options.kernels and kind.startswith("TPU") and query.dtype in (jnp.float32, jnp.bfloat16):
        return "tpu"
    if options.kernels and kind.startswith("NVIDIA") and query.dtype in (jnp.bfloat16, jnp.float16):
        # cuDNN takes wider heads on Hopper and later only, and has no backward pass for odd lengths.
        small = head_dim <= 128 and head_dim % 8 == 0 and width // axis_size("tokens") % 2 == 0
        fits = spans.lengths is not None or (spans.group is not None and all(x % 2 == 0 for x in spans.group))
        if small and fits and options.softcap is None and options.sinks is None and axis_size("tokens") == 1:
            return "cudnn"
        if 16 <= head_dim <= 256 and head_dim.bit_count() == 1:
            return "triton"
    return "dense" if width <= DENSE_WIDTH else "blocks"


def _over_mesh(
    function: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    end: jax.Array,
    start: jax.Array,
    sinks: jax.Array | None,
    *,
    block: int,
    **options: Any,
) -> jax.Array:
    """Runs an implementation on every device's own rows, queries and heads; rows become a multiple of `block` wide.

    The compiler cannot split a kernel, nor a loop over blocks, by itself.
    """
    width = query.shape[1]
    missing = -width % (block * axis_size("tokens"))
    slots = jnp.broadcast_to(jnp.arange(width, width + missing, dtype=jnp.int32), (len(end), missing))
    query, key, value = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (query, key, value))
    end, start = (jnp.concatenate([x, padding], axis=1) for x, padding in ((end, slots + 1), (start, slots)))

    def on_device(query: jax.Array, key: jax.Array, value: jax.Array, *more: jax.Array) -> jax.Array:
        end, start, *sinks = more
        first = axis_index("tokens") * query.shape[1] if axis_size("tokens") > 1 else 0
        return function(query, key, value, end, start, first, sinks=sinks[0] if sinks else None, **options)

    operands = (query, key, value, end, start, *(() if sinks is None else (sinks,)))
    axes = (_QUERIES, _KEYS, _KEYS, ("rows",), ("rows", "tokens"), *(() if sinks is None else (("heads",),)))
    return split_by_hand(on_device, axes, _QUERIES)(*operands)[:, :width]
