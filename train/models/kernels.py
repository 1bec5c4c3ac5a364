"""Attention without scores in memory: splash attention on TPU, cuDNN on NVIDIA GPUs.

Shapes: B rows, T queries, S keys, N query heads, K key-value heads, H head width. Queries stand at the last T of
S tokens.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from train.models.sharding import axis_size, divides, mesh_is_set, partition_spec

Kernel: TypeAlias = Literal["splash", "cudnn"]
LANES = 128
"""Splash attention takes lengths that are multiples of this."""
BLOCKS = (512, 256, 128)
"""Block lengths, the largest divisor is taken: 512 x 512 scores of 256-wide heads fit a v5e, the smallest chip."""
_ROWS: tuple[str | None, ...] = ("rows",)
_QUERY_ROWS: tuple[str | None, ...] = ("rows", "tokens")
_QUERIES: tuple[str | None, ...] = ("rows", "tokens", "heads", None)
_KEYS: tuple[str | None, ...] = ("rows", None, "kv_heads", None)


def device_kind() -> str:
    """Returns the device kind of the mesh, which may differ from this process's, or of the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return str(jax.devices()[0].device_kind if abstract is None else abstract.device_kind)


def choose_kernel(
    query: jax.Array, key: jax.Array, softcap: float | None, sinks: jax.Array | None = None
) -> Kernel | None:
    """Chooses the kernel of these devices for whole sequences of a shape and type; None: XLA's own products.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H].
      softcap: of the scores; cuDNN supports none.
      sinks: [N]; cuDNN supports none.
    """
    kind = device_kind()
    if not kind.startswith(("TPU", "NVIDIA")) or not divides(query.shape[0], "rows"):
        return None
    if not (divides(query.shape[2], "heads") and divides(key.shape[2], "kv_heads")):
        return None
    if not divides(query.shape[1], "tokens"):
        return None
    if kind.startswith("TPU"):
        return "splash" if query.dtype in (jnp.float32, jnp.bfloat16) else None
    # cuDNN takes wider heads on Hopper and later only, and has no backward pass for odd lengths.
    small = query.shape[3] <= 128 and query.shape[3] % 8 == 0
    is_plain = softcap is None and sinks is None
    even = query.shape[1] // axis_size("tokens") % 2 == 0 and key.shape[1] % 2 == 0
    return "cudnn" if query.dtype in (jnp.bfloat16, jnp.float16) and small and even and is_plain else None


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array,
    *,
    window: int | None,
    sliding: bool | jax.Array,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes attention [B, T, N, H] by splash attention, which skips fully masked blocks of scores.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, H].
      segments: [B, S] int32; a token attends to tokens of its number up to itself, in a sliding layer within `window`
        columns.
      window: columns that a sliding layer attends to, the query's own included.
      sliding: whether this is a sliding layer, also as a traced scalar.
      scale: factor of the scores.
      softcap: of the scaled scores.
      sinks: [N], as `AttentionOptions` has them; None: there are none.
      interpret: runs without a TPU, slowly.
    """
    length = query.shape[1]
    first = key.shape[1] - query.shape[1]
    lanes = LANES * axis_size("tokens")

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, -x.shape[1] % lanes)] + [(0, 0)] * (x.ndim - 2))

    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    operands = tuple(padded(x) for x in (scaled, key, value, segments[:, first:], segments))
    shape = (operands[0].shape[1], operands[1].shape[1], query.shape[2] // axis_size("heads"))
    operands += () if sinks is None else (sinks,)
    axes = (_QUERIES, _KEYS, _KEYS, _QUERY_ROWS, _ROWS, *(() if sinks is None else (("heads",),)))

    def run(local: int | None) -> Callable[..., jax.Array]:
        kernel = _splash(shape, axis_size("tokens"), local, first=first, softcap=softcap, interpret=interpret)
        function = _over_mesh(_run_splash, axes, _splash_spec(kernel))
        return functools.partial(function, kernel)

    if isinstance(sliding, bool):
        return run(window if sliding else None)(*operands)[:, :length]
    return lax.cond(sliding, run(window), run(None), *operands)[:, :length]


@functools.lru_cache(maxsize=8)
def _splash(
    shape: tuple[int, int, int], parts: int, window: int | None, *, first: int, softcap: float | None, interpret: bool
) -> Any:
    """Builds the kernel for queries, keys and the heads of one device; the first query has column `first`.

    The host takes seconds to find the blocks of a long sequence, so that they are kept from trace to trace.

    Args:
      parts: of the queries, one for each device of axis context.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    lengths = shape[:2]
    queries, keys = (
        next(size for size in BLOCKS if length % size == 0) for length in (lengths[0] // parts, lengths[1])
    )
    mask = masks.CausalMask(lengths, first) if window is None else masks.LocalMask(lengths, (window - 1, 0), first)
    sizes = kernels.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_q_dq=queries,
        block_kv_dq=keys,
    )
    make = functools.partial(
        kernels.make_splash_mha,
        masks.MultiHeadMask([mask] * shape[2]),
        block_sizes=sizes,
        attn_logits_soft_cap=softcap,
        head_shards=1,
        q_seq_shards=parts,
        interpret=interpret,
    )
    # A thread of its own has neither the trace nor the mesh of the caller, whose devices may not be here.
    with ThreadPoolExecutor(1) as thread:
        return jax.tree.map(np.asarray, thread.submit(make).result())


def _splash_spec(kernel: Any) -> Any:
    """Returns the spec of a kernel's blocks; all heads have the same."""
    mesh = jax.sharding.get_abstract_mesh()
    return kernel.manual_sharding_spec(NamedSharding(mesh, partition_spec((None, "tokens")))) if mesh_is_set() else None


def _run_splash(kernel: Any, *operands: jax.Array) -> jax.Array:
    """Runs splash attention on one device's rows, queries and heads: q, k, v, segments of q and of k, and sinks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    def row(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array, key_ids: jax.Array) -> jax.Array:
        return kernel(query, key, value, kernels.SegmentIds(ids, key_ids), *sinks)

    query, key, value = (x.swapaxes(1, 2) for x in operands[:3])
    ids, key_ids, *sinks = operands[3:]
    return jax.vmap(row)(query, key, value, ids, key_ids).swapaxes(1, 2)


def cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, *, scale: float) -> jax.Array:
    """Computes attention [B, T, N, H] under a mask [B, 1, T, S] with cuDNN; bfloat16 or float16."""

    def local(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, implementation="cudnn")

    return _over_mesh(local, (_QUERIES, _KEYS, _KEYS, ("rows", None, "tokens", None)))(query, key, value, mask)


def _over_mesh(
    function: Callable[..., jax.Array], axes: tuple[tuple[str | None, ...], ...], *first: Any
) -> Callable[..., Any]:
    """Runs a kernel on every device's own rows, queries and heads; XLA cannot partition a kernel by itself.

    Args:
      function: takes the arrays of `axes`, whose first is the queries.
      first: specs of the arguments before them.
    """
    if not mesh_is_set():
        return function
    specs: tuple[PartitionSpec, ...] = tuple(partition_spec(names) for names in axes)
    return jax.shard_map(function, in_specs=(*first, *specs), out_specs=specs[0], check_vma=False)
