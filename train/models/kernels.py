"""Attention without scores in memory: splash attention on TPU, cuDNN on NVIDIA GPUs.

Shapes: B rows, T tokens, N query heads, K key-value heads, H head width.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from train.sharding import mesh_axes, mesh_is_set, partition_spec

Kernel: TypeAlias = Literal["splash", "cudnn"]
LANES = 128
"""Splash attention goes over multiples of so many tokens."""
BLOCKS = (512, 256, 128)
"""Tokens of a block, the largest that divides them: 512 x 512 scores of 256-wide heads fit a v5e, the smallest chip."""
_ROWS: tuple[str | None, ...] = ("rows",)
_QUERIES: tuple[str | None, ...] = ("rows", None, "heads", None)
_KEYS: tuple[str | None, ...] = ("rows", None, "kv_heads", None)


def device_kind() -> str:
    """The kind of the devices of the mesh, which need not be those of this process, or of the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return str(jax.devices()[0].device_kind if abstract is None else abstract.device_kind)


def choose_kernel(query: jax.Array, key: jax.Array, softcap: float | None) -> Kernel | None:
    """The kernel that these devices have for whole sequences of this shape and type; None: XLA's own products.

    Args:
      query: [B, T, N, H]; key: [B, T, K, H].
      softcap: of the scores; cuDNN has none.
    """
    kind = device_kind()
    if not kind.startswith(("TPU", "NVIDIA")) or not _divides(query.shape[0], "rows"):
        return None
    if not (_divides(query.shape[2], "heads") and _divides(key.shape[2], "kv_heads")):
        return None
    if kind.startswith("TPU"):
        return "splash" if query.dtype in (jnp.float32, jnp.bfloat16) else None
    # Wider heads run on Hopper and later alone, and lengths that are odd not in the backward pass.
    small = query.shape[3] <= 128 and query.shape[3] % 8 == 0 and query.shape[1] % 2 == 0
    return "cudnn" if query.dtype in (jnp.bfloat16, jnp.float16) and small and softcap is None else None


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
    """[B, T, N, H] by splash attention: blocks of scores that nothing sees are not computed.

    Args:
      query: [B, T, N, H]; key, value: [B, T, K, H].
      segments: [B, T] int32, equal numbers see each other up to themselves, in a sliding layer within `window` columns.
      window: columns that a sliding layer sees, the query's own included.
      sliding: whether this is a sliding layer, also as a traced scalar.
      scale: of the scores.
      softcap: of the scores after that.
      interpret: run without a TPU, slowly.
    """
    length, width = query.shape[1], [(0, 0), (0, -query.shape[1] % LANES)]

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, width + [(0, 0)] * (x.ndim - 2))

    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    operands = tuple(padded(x) for x in (scaled, key, value, segments))

    def run(local: int | None) -> Callable[..., jax.Array]:
        return _over_mesh(_splash(local, softcap, interpret), (_QUERIES, _KEYS, _KEYS, _ROWS))

    if isinstance(sliding, bool):
        return run(window if sliding else None)(*operands)[:, :length]
    return lax.cond(sliding, run(window), run(None), *operands)[:, :length]


def _splash(window: int | None, softcap: float | None, interpret: bool) -> Callable[..., jax.Array]:
    """Splash attention on the rows and heads of one device."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    def local(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
        length, heads = query.shape[1:3]
        block = next(size for size in BLOCKS if length % size == 0)
        shape = (length, length)
        one = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
        sizes = kernels.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        )
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([one] * heads),
            block_sizes=sizes,
            attn_logits_soft_cap=softcap,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )

        def row(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
            return kernel(query, key, value, segment_ids=kernels.SegmentIds(ids, ids))

        queries, keys, values = (x.swapaxes(1, 2) for x in (query, key, value))
        return jax.vmap(row)(queries, keys, values, segments).swapaxes(1, 2)

    return local


def cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, *, scale: float) -> jax.Array:
    """[B, T, N, H] by cuDNN's fused attention under a mask [B, 1, T, T]; bfloat16 or float16."""

    def local(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, implementation="cudnn")

    return _over_mesh(local, (_QUERIES, _KEYS, _KEYS, _ROWS))(query, key, value, mask)


def _over_mesh(function: Callable[..., jax.Array], axes: tuple[tuple[str | None, ...], ...]) -> Callable[..., Any]:
    """A kernel on every device's own rows and heads; a compiler cannot split what is inside."""
    if not mesh_is_set():
        return function
    specs: tuple[PartitionSpec, ...] = tuple(partition_spec(names) for names in axes)
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)
