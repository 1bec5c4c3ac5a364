"""What NumPy runs, a traced function or eager operations, has the compiled results in shape, dtype and value."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import eager, other_seeds
from tests.numpy_programs import in_numpy

pytestmark = pytest.mark.xla

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "elementwise": lambda x, y, m: (jnp.exp(-abs(x)), jnp.log1p(x**2) / y**3, jnp.sign(x) * jnp.sqrt(y)),
    "logic": lambda x, y, m: (m & (x > y) | ~m, jnp.where(m ^ (x == y), x, 0), jnp.isfinite(x / 0)),
    "sums": lambda x, y, m: (x.sum(-1), m.sum(), jnp.where(m, x, -jnp.inf).max(1), y.min(), m.all(1), m.any(0)),
    "along": lambda x, y, m: (jnp.cumsum(x, 1), jnp.cumsum(x[:, ::-1], 1)[:, ::-1], jnp.cumprod(y, 0)),
    "shapes": lambda x, y, m: (x.T.reshape(-1), jnp.concatenate([x, y[:, 1::2]], 1), x[:, :1] + jnp.arange(7.0)[None]),
    "integers": lambda x, y, m: (m.sum(1) // 2, jnp.mod(m.sum(1), 3), jnp.round(x).astype(int)),
    "scan": lambda x, y, m: jax.lax.scan(lambda c, row: (0.5 * c + row, c), x[0], y)[1],
    "sort": lambda x, y, m: (jnp.sort(x, 1), jnp.argmax(y, 1), x.at[1].set(0)),
    "loops": lambda x, y, m: (
        jax.lax.scan(lambda c, row: (c + row, (c, row.sum())), x[0], y, reverse=True),
        jax.lax.fori_loop(0, m.sum(), lambda step, c: c * y[0, 0] + step.astype(float), x),
        jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c + m[0].astype(float), jnp.zeros(7)),
        jax.vmap(lambda row: jax.lax.while_loop(lambda c: c.sum() > -9, lambda c: c + row, row))(x),
        [jax.lax.switch(m.sum() + which, [jnp.exp, jnp.negative, abs], x) for which in (-99, 1 - m.sum(), 99)],
    ),
    "order": lambda x, y, m: (
        jax.lax.sort((jnp.round(x), y, x), dimension=0, num_keys=2),
        (jnp.argsort(-y, axis=1), jnp.argmin(x, 0), jnp.argmax(jnp.where(m, x, jnp.nan))),
        (jax.lax.cummax(x, 1), jax.lax.cummin(y, 0, reverse=True), jax.lax.cumlogsumexp(x, 1)),
    ),
    "gather": lambda x, y, m: (
        [x.at[jnp.array([0, 9, -1, -9])].get(mode=mode) for mode in ("fill", "clip")],
        (jnp.arange(7).at[jnp.array([[3], [8]])].get(mode="fill"), m.at[7].get(mode="fill")),
        (
            jnp.take_along_axis(x, jnp.argsort(y, 1), 1),
            x[:, jnp.array([[1, 2], [6, 0]])],
            x[jnp.arange(5), m.sum(1) % 7],
        ),
        jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (3,)))(x, jnp.arange(5) * 3 - 2),
    ),
    "scatter": lambda x, y, m: (
        [x.at[jnp.array([0, 9, 0, -1])].add(y[:4], mode=mode) for mode in ("drop", "clip")],
        (x.at[:, 2].min(y[:, 0]), x.at[1, jnp.array([3, 3])].max(0.5), x.at[jnp.array([4, 2])].set(y[:2])),
        jax.ops.segment_sum(y, jnp.array([2, 0, 2, 5, -1]), num_segments=3),
        jax.vmap(lambda row, at, new: row.at[at].set(new))(x, m.sum(1), y[:, :1].sum(1)),
    ),
    "windows": lambda x, y, m: (
        [jax.lax.dynamic_slice(x, (start, m.sum() - 99), (2, 3)) for start in (-1, 1, 4)],
        [jax.lax.dynamic_update_slice(x, y[:2, :3], (start, 9)) for start in (-1, 1, 4)],
        [jax.lax.pad(x, 7.0, ((low, 1, 2), (0, -2, 0))) for low in (-3, 0, 2)],
        (jnp.split(x, (2, 5), 1), jnp.stack([x, y], 1), jnp.tile(x, (2, 3)), jnp.roll(x, 3, 1)),
    ),
    "products": lambda x, y, m: (
        (x @ y.T, x.T @ y, jnp.einsum("bi,bj->bij", x, y), jnp.einsum("bi,bi->b", x, y)),
        (
            jnp.tensordot(x[None], y, ((1, 2), (0, 1))),
            jnp.einsum("abc,dcb->bad", (x[:, None] * y[None])[:2], jnp.stack([x.T, y.T])),
        ),
    ),
    "from hidden states": lambda x, y, m: jax.value_and_grad(
        lambda x: kljax.log_probs_from_hidden(
            x, kljax.Head(y.T, tile=kljax.Tile(2, 3)), m[:, 0].astype(int), entropy=True
        ).entropy.sum()
    )(x),
    "rounding": lambda x, y, m: (
        [way(4 * x) for way in (jnp.round, jnp.floor, jnp.ceil, jnp.sin, jnp.cos, jnp.exp2)],
        jax.lax.round(jnp.array([-2.5, -0.5, 0.5, 1.5, 0.4]), jax.lax.RoundingMethod.AWAY_FROM_ZERO),
        jnp.array([jnp.nan, 1e30, -1e30, jnp.inf, -2.7, 2.7]).astype("int32"),
        (jax.lax.rem(x, y), jnp.nextafter(x, y), jax.lax.rem(-m.sum(1), 3)),
    ),
    "random": lambda x, y, m: jax.random.bernoulli(jax.random.split(jax.random.key(3))[1], 0.5, x.shape),
    "gspo": lambda x, y, m: kljax.gspo_loss(x, y, x * y, m, clip_low=0.2, clip_high=0.3),
    "gae": lambda x, y, m: kljax.gae(x, y, m, gamma=0.9, lam=0.8)[0],
    "grpo": lambda x, y, m: kljax.grpo_advantages(x[:, 0], jnp.array([0, 1, 0, 1, 1]), num_groups=2),
    "k3 weights": lambda x, y, m: jax.vjp(
        lambda x: kljax.estimate_kl(x, y, m, estimator="k3", sampling_log_probs=y, max_ratio=2.0, value_clip=0.4), x
    )[1](y)[0],
    "token weights": lambda x, y, m: kljax.token_weights(m, mode="seq_mean_token_mean", empty_rows="count"),
}


def arrays() -> tuple[np.ndarray, ...]:
    rng = other_seeds.example(3)
    mask = rng.random((5, 7)) < 0.6
    mask[2] = False
    return -rng.exponential(1.0, (5, 7)), -0.01 - rng.exponential(1.0, (5, 7)), mask


def assert_equal(first: Any, second: Any) -> None:
    first, second = jax.tree.leaves(first), jax.tree.leaves(second)
    assert [(x.shape, x.dtype) for x in first] == [(x.shape, x.dtype) for x in second]
    for ran, compiled in zip(first, second, strict=True):
        np.testing.assert_allclose(ran, compiled, rtol=1e-12, atol=1e-14)


def compilations(run: Callable[[], Any]) -> int:
    """The number of programs that XLA compiles, or that are found compiled."""
    counted: list[str] = []

    def count(event: str, **_: Any) -> None:
        counted.extend([event] if event == "/jax/compilation_cache/compile_requests_use_cache" else [])

    jax.monitoring.register_event_listener(count)
    try:
        jax.block_until_ready(run())
    finally:
        jax.monitoring.unregister_event_listener(count)
    return len(counted)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpy_has_the_compiled_results(name: str) -> None:
    function, inputs = FUNCTIONS[name], arrays()
    compiled = jax.jit(function)(*inputs)
    ran = in_numpy(function)(*inputs)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(ran))
    assert_equal(ran, compiled)
    # Eagerly as well, where NumPy runs each operation for itself.
    with eager.run_by_numpy():
        assert_equal(function(*map(jnp.asarray, inputs)), compiled)


def test_arguments_in_trees_are_passed() -> None:
    run = in_numpy(lambda tree, numbers: tree["a"] * numbers[0] + (0 if tree["b"] is None else tree["b"]))
    x = np.arange(3.0)
    np.testing.assert_array_equal(run({"a": x, "b": None}, [2.0]), 2 * x)
    np.testing.assert_array_equal(run({"a": x, "b": x}, [3.0]), 4 * x)


def test_eager_operations_are_not_compiled_and_jitted_ones_are() -> None:
    x, y, mask = map(jnp.asarray, arrays())

    def weighted(x: jax.Array) -> jax.Array:
        return jnp.where(mask, kljax.k3(x, y[:, :7]), 0).sum()

    with eager.run_by_numpy():
        assert compilations(lambda: jax.value_and_grad(weighted)(x)) == 0
        assert compilations(lambda: jax.jit(jax.value_and_grad(weighted))(x)) == 1
        assert compilations(lambda: jax.device_put(x, jax.devices()[1]) * 2.5) == 1
        assert compilations(lambda: x.astype(jnp.bfloat16)) == 1
    assert compilations(lambda: x * 3.7) == 1


def test_eager_results_are_arrays_as_any_other() -> None:
    with eager.run_by_numpy():
        given = np.arange(3.0)
        x = jax.lax.convert_element_type(given, float)
        given[0] = 9
        assert x[0] == 0
        numbers = jnp.asarray(2.0) * 3, jnp.ones(3) * 3, 2 * jnp.arange(3)
    compiled = jnp.asarray(2.0) * 3, jnp.ones(3) * 3, 2 * jnp.arange(3)
    assert [x.aval for x in numbers] == [x.aval for x in compiled]
    assert {x.sharding for x in numbers} == {x.sharding for x in compiled}
    assert not any(x.committed for x in numbers)
