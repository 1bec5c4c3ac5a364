"""Products of rows that are sorted by group with the matrix of their group, without the operations of other groups.

Shapes: N rows, E groups, K inputs, F outputs. Group `e` has the next `group_sizes[e]` rows; rows after the last group
belong to none, are read by nobody, and have results and gradients of 0.

`jax.lax.ragged_dot` multiplies every row with every matrix on CPUs and NVIDIA GPUs, and so does its gradient on TPUs
before JAX 0.12. NVIDIA's Hopper GPUs have kernels of JAX; elsewhere a loop goes through the tiles of rows that exist.
"""

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax

from kljax._narrow import narrow_on_cpu, read_with
from train.models.sharding import device_kind

Implementation: TypeAlias = Literal["loop", "ragged", "megablox", "mosaic"]
MANY_ROWS = (256, 32)
"""Rows of a tile in the loop, and the steps in which the last tile of a group has fewer."""
FEW_ROWS = (24, 4)
"""The same where groups have fewer than 32 rows in the mean, as in a decode step."""
TILING = (512, 1024, 512)
"""Most rows, inputs and outputs of a tile of megablox; smaller arrays take their padded size."""
LANES = 128
MOSAIC_BLOCK = 64
"""Inputs of a block of the kernels for GPUs, which inputs and outputs are padded to a multiple of."""
HOPPER = re.compile(r"NVIDIA (GH|H)\d")
"""Starts the kinds of the GPUs that run these kernels: they take instructions of this generation alone."""
NATIVE_GRADIENT = (0, 12)
"""The first JAX whose gradient of `ragged_dot` is native on TPUs."""
_ROW_TILES = "row_tiles"
_MATRIX_TILES = "matrix_tiles"


def grouped_dot(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, implementation: Implementation | None = None
) -> jax.Array:
    """Multiplies each row with the matrix of its group, in the type of the rows.

    Args:
      x: [N, K] float, sorted by group. Rows of no group may hold anything, NaN included.
      weights: [E, K, F], float or int8. Other types than that of x are converted one matrix at a time by the loop.
      group_sizes: [E] int, non-negative, with a sum of at most N.
      implementation: "loop" computes tiles of rows one after the other, "ragged" calls `jax.lax.ragged_dot`,
        "megablox" computes its gradient by the TPU kernels that JAX ships, "mosaic" calls its kernels for Hopper GPUs,
        which compute in bfloat16 or float16. None chooses for the devices: on TPU "megablox" before JAX 0.12 and
        "ragged" from there on, "mosaic" where it runs, "loop" elsewhere.

    Returns:
      [N, F] in the type of x; exactly 0 in rows of no group. Sums are accumulated in float32 at least.

    Gradient:
      Of x and of float weights, the latter in their type, which "mosaic" rounds to that of x before; empty groups have
      a gradient of 0. int8 weights are treated as constants.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation, or a type that it lacks.
    """
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[1]:
        raise ValueError(f"weights: got {weights.shape} for rows of shape {x.shape}, expected [E, K, F] and [N, K]")
    if group_sizes.shape != weights.shape[:1]:
        raise ValueError(f"group_sizes: got shape {group_sizes.shape}, expected {weights.shape[:1]}, one per matrix")
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(
            f"implementation: got {implementation!r}, expected one of {', '.join(get_args(Implementation))} or None"
        )
    if implementation == "mosaic" and not _is_half(x.dtype):
        raise ValueError(f"x: got {x.dtype} for mosaic, expected bfloat16 or float16")
    product = _PRODUCTS[implementation or choose_implementation(device_kind(), x.dtype)]
    return product(x, weights, group_sizes.astype(jnp.int32))


def choose_implementation(kind: str, dtype: Any) -> Implementation:
    """Chooses the implementation of a device kind, for rows of a type."""
    if not kind.startswith("TPU"):
        return "mosaic" if HOPPER.match(kind) and _is_half(dtype) else "loop"
    return "ragged" if jax.__version_info__[:2] >= NATIVE_GRADIENT else "megablox"


def expected_trips(rows: int, groups: int) -> dict[str, float]:
    """Returns the iterations of the loops over tiles by the names of their scopes, where groups have equal size.

    A count of operations counts each branch of a conditional as taken: both loops get fewer trips.
    """
    # Tiles of both kinds: a program may have products of other rows too, as a sampler has prefill and decode steps.
    trips = {_row_tiles(counts): rows / sum(counts) for counts in (_counts(rows), _counts(rows, rows + 1))}
    return trips | {_MATRIX_TILES: rows / groups / sum(_counts(rows))}


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _read(array: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keeps the conversion of a narrow array in the loop that reads it."""
    return read_with(array, index) if narrow_on_cpu(array, device_kind()) else (array, index)


def _rows_at(x: jax.Array, start: jax.Array, count: int) -> jax.Array:
    array, index = _read(x, start)
    return lax.dynamic_slice_in_dim(array, index, count)


def _counts(rows: int, groups: int = 1) -> tuple[int, ...]:
    """Lists the numbers of rows that a tile may compute, in an array of so many rows and groups."""
    most, step = MANY_ROWS if rows >= MANY_ROWS[1] * groups else FEW_ROWS
    return (*range(step, min(most, rows), step), min(most, rows))


def _row_tiles(counts: tuple[int, ...]) -> str:
    return f"{_ROW_TILES}_{counts[0]}"


class _Tiles(NamedTuple):
    """The tiles of sorted rows. Their number is traced: an empty group has none, and takes no time.

    Attributes:
      number: int32, the tiles that exist.
      groups: [T] int32, the group of each tile; T is the most that there can be.
      starts: [T] int32, the first row of each tile.
      lefts: [T] int32, the rows of its group from there on, at most as many as a tile has.
    """

    number: jax.Array
    groups: jax.Array
    starts: jax.Array
    lefts: jax.Array

    @classmethod
    def of(cls, group_sizes: jax.Array, rows: int, largest: int) -> "_Tiles":
        """Cuts each group into tiles of `largest` rows and a last one with the rest."""
        tiles = -(-group_sizes // largest)
        ends = jnp.cumsum(tiles)
        numbers = jnp.arange(len(group_sizes) + rows // max(largest, 1))
        groups = jnp.sum(numbers[:, None] >= ends, axis=1, dtype=jnp.int32)
        first_rows = jnp.cumsum(group_sizes) - group_sizes
        begins = (numbers - (ends - tiles)[groups]) * largest
        lefts = jnp.clip(group_sizes[groups] - begins, 0, largest)
        return cls(ends[-1], groups, first_rows[groups] + begins, lefts)


def _loop_rows(x: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Computes the product, or that with the transposed matrices."""
    rows = len(x)
    counts = _counts(len(x), len(group_sizes))
    largest = counts[-1]
    tiles = _Tiles.of(group_sizes, len(x), counts[-1])
    outputs = weights.shape[1 if transposed else 2]
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))

    def add_tile(index: jax.Array, y: jax.Array) -> jax.Array:
        start = tiles.starts[index]
        left = tiles.lefts[index]
        array, group = _read(weights, tiles.groups[index])
        matrix = lax.dynamic_index_in_dim(array, group, keepdims=False).astype(x.dtype)
        begin = jnp.minimum(start, rows - largest)

        def product(count: int) -> jax.Array:
            first = jnp.minimum(start, rows - count)
            part = lax.dot_general(_rows_at(x, first, count), matrix, contracted, preferred_element_type=_wide(x.dtype))
            zeros = jnp.zeros((largest, outputs), x.dtype)
            return lax.dynamic_update_slice_in_dim(zeros, part.astype(x.dtype), first - begin, 0)

        # Branches return the rows of a tile: one that updated the result would copy all of it.
        part = _of_size(left, counts, product)
        # The tile may reach into other groups, whose rows stay as they are.
        number = begin + jnp.arange(largest)[:, None]
        inside = (number >= start) & (number < start + left)
        part = jnp.where(inside, part, lax.dynamic_slice_in_dim(y, begin, largest))
        return lax.dynamic_update_slice_in_dim(y, part, begin, 0)

    with jax.named_scope(_row_tiles(counts)):
        return lax.fori_loop(0, tiles.number, add_tile, jnp.zeros((rows, outputs), x.dtype))


def _loop_weights(x: jax.Array, g: jax.Array, group_sizes: jax.Array, dtype: Any) -> jax.Array:
    """Computes the gradient of the matrices, [E, K, F] of x [N, K] and the cotangent [N, F]."""
    rows = len(x)
    counts = _counts(len(x))
    wide = _wide(dtype)
    largest = counts[-1]
    firsts = jnp.cumsum(group_sizes) - group_sizes

    def product(count: int, start: jax.Array, left: jax.Array) -> jax.Array:
        begin = jnp.minimum(start, rows - count)
        number = begin + jnp.arange(count)[:, None]
        inside = (number >= start) & (number < start + left)
        # Both are selected: a NaN in a row of no group times 0 is NaN.
        left_rows, right_rows = (jnp.where(inside, _rows_at(array, begin, count), 0) for array in (x, g))
        return lax.dot_general(left_rows, right_rows, (((0,), (0,)), ((), ())), preferred_element_type=wide)

    def add_group(group: jax.Array, dw: jax.Array) -> jax.Array:
        first = firsts[group]
        size = group_sizes[group]

        def add_tile(index: jax.Array, total: jax.Array) -> jax.Array:
            left = jnp.minimum(size - index * largest, largest)
            return total + _of_size(left, counts, lambda count: product(count, first + index * largest, left))

        total = jnp.zeros((x.shape[1], g.shape[1]), wide)
        with jax.named_scope(_MATRIX_TILES):
            total = lax.fori_loop(0, -(-size // largest), add_tile, total)
        return lax.dynamic_update_index_in_dim(dw, total.astype(dtype), group, 0)

    empty = jnp.zeros((len(group_sizes), x.shape[1], g.shape[1]), dtype)
    return lax.fori_loop(0, len(group_sizes), add_group, empty)


def _of_size(left: jax.Array, counts: tuple[int, ...], product: Callable[[int], jax.Array]) -> jax.Array:
    """Computes the product of the smallest number of rows that holds `left` of them."""
    return lax.switch((left - 1) // counts[0], [functools.partial(product, count) for count in counts])


def _loop_gradient(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    dw = _loop_weights(x, g, group_sizes, weights.dtype) if _is_float(weights) else None
    return _loop_rows(g, weights, group_sizes, transposed=True), dw


def _ragged_rows(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    y = lax.ragged_dot(x, weights.astype(x.dtype), group_sizes, preferred_element_type=x.dtype)
    return _without_rest(y, group_sizes)


def _ragged_gradient(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    # Only the gradient of the matrices mixes rows.
    x = _without_rest(x, group_sizes)
    g = _without_rest(g, group_sizes)
    _, backward = jax.vjp(lambda x, weights: _ragged_rows(x, weights, group_sizes), x, weights)
    dx, dw = backward(g)
    return dx, dw if _is_float(weights) else None


def _megablox_gradient(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    # An attribute of the package hides the module of this name.
    megablox = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    interpret = not device_kind().startswith("TPU")
    rows = len(x)
    short = -rows % LANES
    if short:  # Tiles must divide the rows.
        x, g = (jnp.pad(array, ((0, short), (0, 0))) for array in (x, g))
    tile = next(size for size in (TILING[0], TILING[0] // 2, LANES) if len(x) % size == 0)
    inputs, outputs = (
        min(size, -(-axis // LANES) * LANES) for size, axis in zip(TILING[1:], weights.shape[1:], strict=True)
    )
    dx = megablox.gmm(
        g,
        weights.astype(g.dtype),
        group_sizes,
        preferred_element_type=x.dtype,
        tiling=(tile, outputs, inputs),
        transpose_rhs=True,
        interpret=interpret,
    )
    dx = _without_rest(dx, group_sizes)[:rows]
    if not _is_float(weights):
        return dx, None
    dw = megablox.tgmm(
        x.T,
        g,
        group_sizes,
        preferred_element_type=weights.dtype,
        tiling=(tile, inputs, outputs),
        interpret=interpret,
    )
    return dx, dw


def _mosaic_rows(x: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Computes the product, or that with the transposed matrices, whose conversion is a copy of all of them."""
    kernels = importlib.import_module("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu")
    axis = 1 if transposed else 2
    outputs = weights.shape[axis]
    x, weights = _padded(x, 1), _padded(weights.astype(x.dtype), 1, 2)
    has_many = len(x) >= MANY_ROWS[1] * len(group_sizes)
    y = kernels.ragged_dot(
        x,
        weights,
        group_sizes=group_sizes,
        block_m=MOSAIC_BLOCK,
        # Few rows leave too few blocks for the cores of a GPU unless they are narrow.
        block_n=_divisor(weights.shape[axis], 256 if has_many else 128),
        block_k=MOSAIC_BLOCK,
        max_concurrent_steps=4,
        grid_block_n=1,
        transpose_rhs=transposed,
    )
    return _without_rest(y[:, :outputs], group_sizes)


def _mosaic_gradient(
    x: jax.Array, weights: jax.Array, group_sizes: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    dx = _mosaic_rows(g, weights, group_sizes, transposed=True)
    if not _is_float(weights):
        return dx, None
    kernels = importlib.import_module("jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu")
    # It multiplies the rows beside a group by 0.
    x, g = (_padded(_without_rest(array, group_sizes), 1) for array in (x, g))
    dw = kernels.transposed_ragged_dot(
        x,
        g,
        group_sizes=group_sizes,
        block_m=_divisor(x.shape[1], 128),
        block_n=_divisor(g.shape[1], 128),
        block_k=MOSAIC_BLOCK,
        max_concurrent_steps=4,
        grid_block_n=1,
    )
    return dx, dw[:, : weights.shape[1], : weights.shape[2]].astype(weights.dtype)


def _padded(x: jax.Array, *axes: int) -> jax.Array:
    """Pads axes with zeros to multiples of a block; an array that has them stays as it is."""
    widths = [(0, -size % MOSAIC_BLOCK if axis in axes else 0) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def _divisor(size: int, most: int) -> int:
    """Returns the largest multiple of a block, at most `most`, that divides a padded size."""
    return next(width for width in range(most, 0, -MOSAIC_BLOCK) if size % width == 0)


def _without_rest(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Sets rows of no group to 0; kernels leave them as they are in memory."""
    return jnp.where((jnp.arange(len(x)) < group_sizes.sum())[:, None], x, 0)


def _is_float(weights: jax.Array) -> bool:
    return jnp.issubdtype(weights.dtype, jnp.floating)


def _is_half(dtype: Any) -> bool:
    return jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)


def _make_product(forward: Callable[..., jax.Array], gradient: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Makes a product with a gradient of its own: a loop with a traced trip count has none."""
    product = jax.custom_vjp(forward)

    def run(x: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, Any]:
        return forward(x, weights, group_sizes), (x, weights, group_sizes)

    def differentiate(residuals: Any, g: jax.Array) -> tuple[Any, ...]:
        return *gradient(*residuals, g), None

    product.defvjp(run, differentiate)
    return product


_PRODUCTS: dict[Implementation, Callable[..., jax.Array]] = {
    "loop": _make_product(_loop_rows, _loop_gradient),
    "ragged": _make_product(_ragged_rows, _ragged_gradient),
    "megablox": _make_product(_ragged_rows, _megablox_gradient),
    "mosaic": _make_product(_mosaic_rows, _mosaic_gradient),
}
