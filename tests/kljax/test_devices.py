"""Statistics and choices over rows on several devices, along one axis of a mesh and along two of them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import kljax
from kljax import _devices
from kljax._typing import AxisName

ROWS, LENGTH, GROUPS = 16, 3, 5
MESHES = {
    "rows": Mesh(np.array(jax.devices()[:8]), ("rows",)),
    "two axes": Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b")),
}
RNG = np.random.default_rng(7)
REWARDS = RNG.integers(-9, 10, ROWS) / 2  # sums without rounding, in any order
IDS = RNG.integers(-1, GROUPS, ROWS)
TOKENS = RNG.normal(size=(3, ROWS, LENGTH))
MASK = RNG.random((ROWS, LENGTH)) < 0.8


def on_mesh(name: str, function: Callable[..., Any], *arrays: Any, out_specs: Any = None) -> Any:
    """The function of the rows of each device, which is told the axes that they are spread over."""
    mesh = MESHES[name]
    axes = mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]
    mapped = functools.partial(function, axis_name=axes)
    spread = jax.shard_map(mapped, mesh=mesh, in_specs=P(axes), out_specs=P(axes) if out_specs is None else out_specs)
    # Unjitted, every operation would be a program on eight devices of its own.
    return jax.jit(spread)(*map(jnp.asarray, arrays))


@pytest.mark.parametrize("name", MESHES)
def test_sums_and_extremes_cover_all_rows(name: str) -> None:
    def statistics(values: jax.Array, axis_name: AxisName) -> tuple[jax.Array, ...]:
        selected = _devices.all_rows(values, axis_name)
        return (
            _devices.over_devices(values.sum(), axis_name),
            _devices.least(values.min(), axis_name),
            _devices.greatest(values.max(), axis_name),
            _devices.same_everywhere(selected[0] - 2 * selected[-1], axis_name),
        )

    expected = (REWARDS.sum(), REWARDS.min(), REWARDS.max(), REWARDS[0] - 2 * REWARDS[-1])
    actual = on_mesh(name, statistics, REWARDS, out_specs=P())
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(statistics(jnp.asarray(REWARDS), None), actual)
    gradient = jax.grad(lambda x: on_mesh(name, statistics, x, out_specs=P())[3])(REWARDS)
    np.testing.assert_array_equal(gradient, np.eye(ROWS)[0] - 2 * np.eye(ROWS)[-1])


@pytest.mark.parametrize("name", MESHES)
def test_local_rows_are_the_inputs(name: str) -> None:
    def there_and_back(values: jax.Array, axis_name: AxisName) -> jax.Array:
        return _devices.local_rows(_devices.all_rows(values, axis_name), axis_name)

    np.testing.assert_array_equal(on_mesh(name, there_and_back, TOKENS[0]), TOKENS[0])
    assert there_and_back(REWARDS, None) is REWARDS


@pytest.mark.parametrize("name", MESHES)
def test_masked_statistics_are_of_all_rows(name: str) -> None:
    def statistics(values: jax.Array, mask: jax.Array, axis_name: AxisName = None) -> tuple[jax.Array, ...]:
        named: dict[str, Any] = {"axis_name": axis_name}
        return (
            kljax.masked_whiten(values, mask, **named),
            kljax.masked_sum(values, mask, **named),
            kljax.masked_mean(values, mask, **named),
            kljax.masked_var(values, mask, **named),
        )

    axes = MESHES[name].axis_names
    # The rows of a device have a mean and a scale of their own.
    values = TOKENS[0] * np.linspace(0.1, 3, ROWS)[:, None] + np.linspace(-4, 4, ROWS)[:, None]
    spread = on_mesh(name, statistics, values, MASK, out_specs=(P(axes), P(), P(), P()))
    for actual, expected in zip(spread, statistics(values, MASK), strict=True):
        np.testing.assert_allclose(actual, expected, 1e-12, 1e-12)


@pytest.mark.parametrize("name", MESHES)
def test_groups_spread_over_several_devices(name: str) -> None:
    for function in (
        functools.partial(kljax.grpo_advantages, scale="batch_std"),
        kljax.pass_at_k_advantages,
    ):

        def of_groups(rewards: Any, ids: Any, axis_name: AxisName = None, function: Any = function) -> jax.Array:
            return function(rewards, kljax.Groups(ids, GROUPS, axis_name=axis_name))

        full = of_groups(REWARDS, IDS)
        assert np.any(full != 0)
        np.testing.assert_allclose(on_mesh(name, of_groups, REWARDS, IDS), full, 1e-12, 1e-14)


@pytest.mark.parametrize("name", MESHES)
def test_roles_see_rows_in_batch_order(name: str) -> None:
    start = np.linspace(-1, 1, GROUPS)

    def rae(rewards: jax.Array, ids: jax.Array, axis_name: AxisName = None) -> tuple[jax.Array, jax.Array]:
        return kljax.rae_advantages(rewards, start, kljax.Groups(ids, GROUPS, axis_name=axis_name))

    axes = MESHES[name].axis_names
    actual = on_mesh(name, rae, REWARDS, IDS, out_specs=(P(axes), P()))
    jax.tree.map(np.testing.assert_array_equal, actual, rae(REWARDS, IDS))


@pytest.mark.parametrize("name", MESHES)
def test_tokens_are_chosen_by_rank_in_the_batch(name: str) -> None:
    def dropped(log_probs: Any, old: Any, advantages: Any, mask: Any, axis_name: AxisName = None) -> jax.Array:
        # Nearly all tokens are candidates, and the key decides.
        key = jax.random.key(3)
        options: dict[str, Any] = {
            "fraction": 0.2,
            "lower": -jnp.inf,
            "upper": jnp.inf,
            "clip_low": 0.9,
            "clip_high": 99.0,
        }
        return kljax.clip_cov_loss(log_probs, old, advantages, mask, key, axis_name=axis_name, **options) == 0

    full = dropped(*TOKENS, MASK)
    assert (full & MASK).sum() == int(0.2 * MASK.sum())
    np.testing.assert_array_equal(on_mesh(name, dropped, *TOKENS, MASK), full)


@pytest.mark.parametrize("name", MESHES)
def test_first_of_equal_scores_is_chosen_across_devices(name: str) -> None:
    ones, mask = np.ones((ROWS, LENGTH)), np.ones((ROWS, LENGTH), bool)

    def paying(log_probs: Any, old: Any, advantages: Any, mask: Any, axis_name: AxisName = None) -> jax.Array:
        with_penalty, without = (
            kljax.kl_cov_loss(log_probs, old, advantages, mask, fraction=0.25, coef=coef, axis_name=axis_name)
            for coef in (1.0, 0.0)
        )
        return with_penalty > without

    actual = on_mesh(name, paying, ones, 0 * ones, ones, mask)
    np.testing.assert_array_equal(np.flatnonzero(actual), np.arange(ROWS * LENGTH // 4))
