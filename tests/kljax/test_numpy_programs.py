"""A function that NumPy runs has the results of the compiled one, in shape, dtype and value."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import other_seeds
from tests.kljax.numpy_programs import in_numpy

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "elementwise": lambda x, y, m: (jnp.exp(-abs(x)), jnp.log1p(x**2) / y**3, jnp.sign(x) * jnp.sqrt(y)),
    "logic": lambda x, y, m: (m & (x > y) | ~m, jnp.where(m ^ (x == y), x, 0), jnp.isfinite(x / 0)),
    "sums": lambda x, y, m: (x.sum(-1), m.sum(), jnp.where(m, x, -jnp.inf).max(1), y.min(), m.all(1), m.any(0)),
    "along": lambda x, y, m: (jnp.cumsum(x, 1), jnp.cumsum(x[:, ::-1], 1)[:, ::-1], jnp.cumprod(y, 0)),
    "shapes": lambda x, y, m: (x.T.reshape(-1), jnp.concatenate([x, y[:, 1::2]], 1), x[:, :1] + jnp.arange(7.0)[None]),
    "integers": lambda x, y, m: (m.sum(1) // 2, jnp.mod(m.sum(1), 3), jnp.round(x).astype(int)),
    "scan": lambda x, y, m: jax.lax.scan(lambda c, row: (0.5 * c + row, c), x[0], y)[1],
    "sort": lambda x, y, m: (jnp.sort(x, 1), jnp.argmax(y, 1), x.at[1].set(0)),
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpy_has_the_compiled_results(name: str) -> None:
    function, inputs = FUNCTIONS[name], arrays()
    first, second = in_numpy(function)(*inputs), jax.jit(function)(*inputs)
    first, second = jax.tree.leaves(first), jax.tree.leaves(second)
    assert [(x.shape, x.dtype) for x in first] == [(x.shape, x.dtype) for x in second]
    for ran, compiled in zip(first, second, strict=True):
        assert isinstance(ran, np.ndarray)
        np.testing.assert_allclose(ran, compiled, rtol=1e-12, atol=1e-14)


def test_arguments_in_trees_are_passed() -> None:
    run = in_numpy(lambda tree, numbers: tree["a"] * numbers[0] + (0 if tree["b"] is None else tree["b"]))
    x = np.arange(3.0)
    np.testing.assert_array_equal(run({"a": x, "b": None}, [2.0]), 2 * x)
    np.testing.assert_array_equal(run({"a": x, "b": x}, [3.0]), 4 * x)
