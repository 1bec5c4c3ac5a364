"""The grouped product against the product of each group apart."""

import functools
import sys
from typing import ClassVar, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.models.grouped import Implementation, choose_implementation, expected_trips, grouped_dot
from train.plan.compiler import hlo
from train.plan.compiler.flops import count_flops

# The kernels for GPUs run there alone: tests/train/test_accelerator.py.
IMPLEMENTATIONS = [name for name in get_args(Implementation) if name != "mosaic"]
SIZES = {
    "uneven": (5, 0, 37, 1, 0, 70, 3),
    "one group": (0, 0, 97, 0),
    "first group": (97, 0, 0),
    "none": (0, 0, 0),
    "few": (1, 2, 0, 1),
    "several tiles": (300, 0, 33, 289, 31),
}
CASES = [
    pytest.param(name, implementation, id=f"{name}, {implementation}")
    for implementation in IMPLEMENTATIONS
    for name in SIZES
    # Interpreted kernels are slow: the large case shows that tiles follow each other.
    if not (implementation == "megablox" and name in ("first group", "few"))
]
INPUTS, OUTPUTS, REST = 12, 7, 6


def draw(sizes: tuple[int, ...], dtype: str = "float32", rest: int = REST) -> tuple[jax.Array, ...]:
    """Rows with NaN after the last group, matrices, sizes and a cotangent."""
    keys, rows = jax.random.split(jax.random.key(len(sizes)), 3), sum(sizes) + rest
    x = jax.random.normal(keys[0], (rows, INPUTS)).at[sum(sizes) :].set(jnp.nan)
    weights = jax.random.normal(keys[1], (len(sizes), INPUTS, OUTPUTS)) / INPUTS**0.5
    g = jax.random.normal(keys[2], (rows, OUTPUTS)).at[sum(sizes) :].set(jnp.nan)
    return x.astype(dtype), weights.astype(dtype), jnp.array(sizes), g.astype(dtype)


def by_each_group(x, weights, sizes, g) -> tuple[np.ndarray, ...]:
    """Output and gradients, in float64."""
    x, weights, g = (np.asarray(array, np.float64) for array in (x, weights, g))
    y, dx, dw = np.zeros((len(x), weights.shape[2])), np.zeros_like(x), np.zeros_like(weights)
    for group, (last, size) in enumerate(zip(np.cumsum(sizes), np.asarray(sizes), strict=True)):
        rows = slice(last - size, last)
        y[rows], dx[rows] = x[rows] @ weights[group], g[rows] @ weights[group].T
        dw[group] = x[rows].T @ g[rows]
    return y, dx, dw


def by_groups(implementation, x, weights, sizes, g) -> tuple[jax.Array, ...]:
    @jax.jit
    def run(x, weights, sizes, g):
        y, backward = jax.vjp(lambda x, w: grouped_dot(x, w, sizes, implementation=implementation), x, weights)
        return y, *backward(g)

    return run(x, weights, sizes, g)


def assert_close(actual, expected, tolerance: float) -> None:
    for result, exact in zip(actual, expected, strict=True):
        scale = np.abs(exact).max(initial=0.0)
        np.testing.assert_allclose(np.asarray(result, np.float64), exact, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_groups_give_the_products_of_their_rows(name, implementation):
    """Value and both gradients; rows of no group hold NaN, and get exactly 0."""
    arrays = draw(SIZES[name])
    actual = by_groups(implementation, *arrays)
    assert_close(actual, by_each_group(*arrays), 2e-6)
    for result in actual[:2]:
        assert (result[sum(SIZES[name]) :] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_groups_in_bfloat16_round_once(implementation):
    """Sums are accumulated in float32: 289 ones would stop at 256 in bfloat16."""
    x, weights, sizes, g = draw(SIZES["several tiles"], "bfloat16")
    actual = by_groups(implementation, x, weights, sizes, g)
    assert all(result.dtype == jnp.bfloat16 for result in actual)
    assert_close(actual, by_each_group(x, weights, sizes, g), 2**-8)
    ones = by_groups(implementation, jnp.ones_like(x), weights, sizes, jnp.ones_like(g))[2]
    np.testing.assert_array_equal(ones[:, 0, 0], jnp.array(SIZES["several tiles"], jnp.bfloat16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_wide_weights_keep_a_wide_gradient(implementation):
    x, weights, sizes, g = draw(SIZES["uneven"], "bfloat16")
    wide = by_groups(implementation, x, weights.astype("float32"), sizes, g)
    narrow = by_groups(implementation, x, weights, sizes, g)
    assert [result.dtype for result in wide] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    chex.assert_trees_all_equal(wide[:2], narrow[:2])
    assert_close(wide[2:], by_each_group(x, weights, sizes, g)[2:], 2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_int8_weights_are_constants(implementation):
    x, weights, sizes, g = draw(SIZES["uneven"])
    quantised = jnp.round(20 * weights).astype(jnp.int8)

    def run(x):
        return grouped_dot(x, quantised, sizes, implementation=implementation)

    y, backward = jax.vjp(run, x)
    assert_close((y, *backward(g)), by_each_group(x, quantised, sizes, g)[:2], 2e-6)


def test_rows_without_a_rest_fill_the_array():
    """The last tile would reach past the end."""
    for sizes in ((3, 30), (40, 5), (7,), (256, 1), (24, 2, 24, 1), (0,)):
        arrays = draw(sizes, rest=0)
        assert_close(by_groups("loop", *arrays), by_each_group(*arrays), 2e-6)


@pytest.mark.parametrize("rows", [8, 64, 256])
def test_absent_tiles_multiply_nothing(rows):
    """Tiles of all rows too, of which XLA could compute the product with each matrix outside of the loop."""
    operands = jnp.zeros((rows, INPUTS)), jnp.zeros((3, INPUTS, OUTPUTS)), jnp.zeros(3, int)
    program = hlo.parse(
        jax.jit(functools.partial(grouped_dot, implementation="loop")).lower(*operands).compile().as_text()
    )
    trips = expected_trips(rows, 3)
    assert count_flops(program, trips) > 0
    assert count_flops(program, dict.fromkeys(trips, 0.0)) == 0


def test_counted_flops_are_three_products():
    x, weights, sizes, g = draw((40, 50))
    program = jax.jit(functools.partial(by_groups, "loop")).lower(x, weights, sizes, g).compile().as_text()
    flops = count_flops(hlo.parse(program), expected_trips(len(x), 2))
    np.testing.assert_allclose(flops, 3 * 2 * len(x) * INPUTS * OUTPUTS, rtol=1e-6)


def test_trips_are_expected_for_other_rows_too():
    """A sampler has products of many rows in the prefill and of few in decode steps."""
    assert expected_trips(64, 16) == {
        "row_tiles_4": 64 / sum(range(4, 25, 4)),
        "row_tiles_32": 64 / (32 + 64),
        "matrix_tiles": 4 / (32 + 64),
    }


def test_group_sizes_are_mapped():
    x, weights, _, _ = draw((9, 4, 20))
    sizes = jnp.array([[9, 4, 20], [0, 30, 3]])
    mapped = jax.vmap(lambda sizes: grouped_dot(x, weights, sizes, implementation="loop"))(sizes)
    for result, size in zip(mapped, sizes, strict=True):
        assert_close((result,), by_each_group(x, weights, size, result)[:1], 2e-6)


def test_implementation_is_chosen_by_device():
    native = jax.__version_info__[:2] >= (0, 12)
    chosen = {
        ("cpu", "bfloat16"): "loop",
        ("TPU v5p", "float32"): "ragged" if native else "megablox",
        ("NVIDIA H100 80GB HBM3", "bfloat16"): "mosaic",
        ("NVIDIA GH200 480GB", "float16"): "mosaic",
        ("NVIDIA H100 80GB HBM3", "float32"): "loop",
        ("NVIDIA A100-SXM4-80GB", "bfloat16"): "loop",
        ("NVIDIA B200", "bfloat16"): "loop",
    }
    assert {kind: choose_implementation(*kind) for kind in chosen} == chosen


class StandIns:
    """In place of the kernels for GPUs: they refuse what these refuse, and leave rows of no group as they find them."""

    blocks: ClassVar[list[tuple[int, ...]]] = []

    @classmethod
    def ragged_dot(cls, lhs, rhs, *, group_sizes, block_m, block_n, block_k, transpose_rhs, **_):
        matrices = rhs.swapaxes(1, 2) if transpose_rhs else rhs
        assert lhs.dtype == rhs.dtype == jnp.bfloat16
        assert lhs.shape[1] % block_k == matrices.shape[2] % block_n == 0
        cls.blocks.append((block_m, block_n, block_k))
        inside = (jnp.arange(len(lhs)) < group_sizes.sum())[:, None]
        return jnp.where(inside, jax.lax.ragged_dot(lhs, matrices, group_sizes), jnp.nan)

    @classmethod
    def transposed_ragged_dot(cls, lhs, rhs, *, group_sizes, block_m, block_n, block_k, **_):
        assert lhs.dtype == rhs.dtype == jnp.bfloat16
        assert lhs.shape[1] % block_m == rhs.shape[1] % block_n == 0
        cls.blocks.append((block_m, block_n, block_k))
        ends = jnp.cumsum(group_sizes)
        number = jnp.arange(len(lhs))
        is_of = (number >= (ends - group_sizes)[:, None]) & (number < ends[:, None])
        return jnp.einsum("nk,nf,en->ekf", *(x.astype(jnp.float32) for x in (lhs, rhs, is_of))).astype(lhs.dtype)


@pytest.fixture
def stand_ins(monkeypatch):
    for name in ("ragged_dot_mgpu", "transposed_ragged_dot_mgpu"):
        monkeypatch.setitem(sys.modules, f"jax.experimental.pallas.ops.gpu.{name}", StandIns)
    monkeypatch.setattr(StandIns, "blocks", [])
    return StandIns


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_operands_of_the_kernels_for_gpus(stand_ins, dtype):
    """Sizes are padded to blocks, and results cut; NaN in rows of no group reaches nothing."""
    x, weights, sizes, g = draw(SIZES["uneven"], "bfloat16")
    weights = jnp.round(20 * weights).astype("int8") if dtype == "int8" else weights.astype(dtype)
    y, backward = jax.vjp(lambda x, w: grouped_dot(x, w, sizes, implementation="mosaic"), x, weights)
    dx, dw = backward(g)
    is_float = dtype != "int8"
    assert_close((y, dx, *[dw] * is_float), by_each_group(x, weights, sizes, g)[: 2 + is_float], 2**-7)
    assert dw.dtype == (dtype if is_float else jax.dtypes.float0)
    assert stand_ins.blocks == [(64, 64, 64)] * (2 + is_float)
    assert (y[116:] == 0).all()
    assert (dx[116:] == 0).all()


def test_blocks_of_the_kernels_for_gpus(stand_ins):
    """Wide where many rows of a group fill a GPU, and of the expert width of GPT-OSS, whose largest divisor is 192."""
    for rows, (inputs, outputs), expected in (
        (128, (256, 768), [(64, 256, 64), (64, 256, 64), (128, 128, 64)]),
        (128, (64, 2880), [(64, 192, 64), (64, 64, 64), (64, 64, 64)]),
        (16, (256, 768), [(64, 128, 64), (64, 128, 64), (128, 128, 64)]),
    ):
        stand_ins.blocks.clear()
        arrays = jnp.zeros((rows, inputs), "bfloat16"), jnp.zeros((2, inputs, outputs), "bfloat16")
        sizes, g = jnp.array([rows // 2, 3]), jnp.zeros((rows, outputs), "bfloat16")
        jax.vjp(lambda x, w, sizes=sizes: grouped_dot(x, w, sizes, implementation="mosaic"), *arrays)[1](g)
        assert stand_ins.blocks == expected


@pytest.mark.parametrize(
    ("shapes", "implementation", "message"),
    [
        (((4, 3), (2, 5, 3), (2,)), None, r"weights: got \(2, 5, 3\) for rows of shape \(4, 3\)"),
        (((4, 3), (2, 3, 5), (3,)), None, r"group_sizes: got shape \(3,\), expected \(2,\)"),
        (((4, 3), (2, 3, 5), (2,)), "dense", "implementation: got 'dense', expected one of loop, ragged, megablox, mo"),
        (((4, 3), (2, 3, 5), (2,)), "mosaic", "x: got float32 for mosaic, expected bfloat16 or float16"),
    ],
)
def test_wrong_operands_are_named(shapes, implementation, message):
    x, weights, sizes = map(jnp.zeros, shapes)
    with pytest.raises(ValueError, match=message):
        grouped_dot(x, weights, sizes.astype(int), implementation=implementation)
