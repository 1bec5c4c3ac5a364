"""Attention without scores in memory: splash attention on TPU, cuDNN on NVIDIA GPUs.

Shapes: B rows, T queries, S keys, N query heads, K key-value heads, H head width. Queries are those of the last T of
S tokens.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from train.models.sharding import mesh_axes, mesh_is_set, partition_spec

Kernel: TypeAlias = Literal["splash", "cudnn"]
LANES = 128
"""Splash attention takes lengths that are multiples of this."""
BLOCKS = (512, 256, 128)
"""Block lengths, the largest divisor is taken: 512 x 512 scores of 256-wide heads fit a v5e, the smallest chip."""
_ROWS: tuple[str | None, ...] = ("rows",)
_QUERIES: tuple[str | None, ...] = ("rows", None, "heads", None)
_KEYS: tuple[str | None, ...] = ("rows", None, "kv_heads", None)


def device_kind() -> str:
    """Returns the device kind of the mesh, which may differ from this process's, or of the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return str(jax.devices()[0].device_kind if abstract is None else abstract.device_kind)


def choose_kernel(query: jax.Array, key: jax.Array, softcap: float | None) -> Kernel | None:
    """Chooses the kernel of these devices for whole sequences of a shape and type; None: XLA's own products.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H].
      softcap: of the scores; cuDNN supports none.
    """
    kind = device_kind()
    if not kind.startswith(("TPU", "NVIDIA")) or not _divides(query.shape[0], "rows"):
        return None
    if not (_divides(query.shape[2], "heads") and _divides(key.shape[2], "kv_heads")):
        return None
    if kind.startswith("TPU"):
        return "splash" if query.dtype in (jnp.float32, jnp.bfloat16) else None
    # cuDNN takes wider heads on Hopper and later only, and has no backward pass for odd lengths.
    small = query.shape[3] <= 128 and query.shape[3] % 8 == 0
    even = query.shape[1] % 2 == 0 and key.shape[1] % 2 == 0
    return "cudnn" if query.dtype in (jnp.bfloat16, jnp.float16) and small and even and softcap is None else None


def _divides(size: int, axis: str) -> bool:
    if not mesh_is_set():
        return True
    shape, parts = jax.sharding.get_abstract_mesh().shape, 1
    for name in mesh_axes(axis):
        parts *= shape[name]
    return size % parts == 0


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
      interpret: runs without a TPU, slowly.
    """
    length, first = query.shape[1], key.shape[1] - query.shape[1]

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, -x.shape[1] % LANES)] + [(0, 0)] * (x.ndim - 2))

    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    operands = tuple(padded(x) for x in (scaled, key, value, segments[:, first:], segments))

    def run(local: int | None) -> Callable[..., jax.Array]:
        return _over_mesh(_splash(local, first, softcap, interpret), (_QUERIES, _KEYS, _KEYS, _ROWS, _ROWS))

    if isinstance(sliding, bool):
        return run(window if sliding else None)(*operands)[:, :length]
    return lax.cond(sliding, run(window), run(None), *operands)[:, :length]


def _splash(window: int | None, first: int, softcap: float | None, interpret: bool) -> Callable[..., jax.Array]:
    """Builds splash attention for the rows and heads of one device; the first query has column `first`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    def local(
        query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array, key_segments: jax.Array
    ) -> jax.Array:
        shape = (query.shape[1], key.shape[1])
        queries, keys = (next(size for size in BLOCKS if length % size == 0) for length in shape)
        one = masks.CausalMask(shape, first) if window is None else masks.LocalMask(shape, (window - 1, 0), first)
        sizes = kernels.BlockSizes(
            block_q=queries,
            block_kv=keys,
            block_q_dkv=queries,
            block_kv_dkv=keys,
            block_q_dq=queries,
            block_kv_dq=keys,
        )
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([one] * query.shape[2]),
            block_sizes=sizes,
            attn_logits_soft_cap=softcap,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )

        def row(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array, key_ids: jax.Array) -> jax.Array:
            return kernel(query, key, value, segment_ids=kernels.SegmentIds(ids, key_ids))

        query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
        return jax.vmap(row)(query, key, value, segments, key_segments).swapaxes(1, 2)

    return local


def cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, *, scale: float) -> jax.Array:
    """Computes attention [B, T, N, H] under a mask [B, 1, T, S] with cuDNN; bfloat16 or float16."""

    def local(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, implementation="cudnn")

    return _over_mesh(local, (_QUERIES, _KEYS, _KEYS, _ROWS))(query, key, value, mask)


def _over_mesh(function: Callable[..., jax.Array], axes: tuple[tuple[str | None, ...], ...]) -> Callable[..., Any]:
    """Runs a kernel on every device's own rows and heads; XLA cannot partition a kernel by itself."""
    if not mesh_is_set():
        return function
    specs: tuple[PartitionSpec, ...] = tuple(partition_spec(names) for names in axes)
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)
