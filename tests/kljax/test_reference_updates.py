"""References that follow the policy: formulas, dtypes, layouts, donated buffers."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kljax

RNG = np.random.default_rng(0)


def tree(seed: int) -> kljax.Policy:
    rng = np.random.default_rng(seed)
    params = {"w": jnp.asarray(rng.normal(size=(8, 3))), "half": jnp.asarray(rng.normal(size=4), jnp.bfloat16)}
    return kljax.Policy(params, {"a": jnp.asarray(rng.normal(size=8), jnp.float32), "rank": jnp.int32(seed)})


def host(of: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), of)


@pytest.mark.parametrize("decay", [0.0, 0.4, 0.99, 1.0])
def test_the_average_leaf_by_leaf(decay: float) -> None:
    old, new = tree(0), tree(1)
    got = jax.jit(lambda r, p, d: kljax.ema_reference(r, p, decay=d))(old, new, decay)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, old)
    for name, rtol in (("w", 1e-14), ("half", 2**-8)):
        expected = decay * host(old).params[name] + (1 - decay) * host(new).params[name]
        np.testing.assert_allclose(host(got).params[name], expected, rtol, 1e-15)
    np.testing.assert_allclose(got.adapter["a"], decay * old.adapter["a"] + (1 - decay) * new.adapter["a"], 1e-6, 1e-7)
    assert got.adapter["rank"] == 1


def test_the_ends_and_equal_weights_are_exact() -> None:
    old, new = tree(0), tree(1)
    chex.assert_trees_all_equal(kljax.ema_reference(old, new, decay=0.0), new)
    floats = lambda policy: (policy.params, policy.adapter["a"])  # noqa: E731
    broken = jax.tree.map(lambda x: x * jnp.asarray(jnp.nan).astype(x.dtype), floats(new))
    chex.assert_trees_all_equal(kljax.ema_reference(floats(old), broken, decay=1.0), floats(old))
    for decay in (0.1, 0.3, 0.999):
        chex.assert_trees_all_equal(kljax.ema_reference(new, new, decay=decay), new)


def test_steps_of_an_average_are_a_geometric_sum() -> None:
    start, weights = np.float64(3.0), RNG.normal(size=20)
    _, references = jax.lax.scan(
        lambda r, p: (kljax.ema_reference(r, p, decay=0.9),) * 2, jnp.asarray(start), jnp.asarray(weights)
    )
    expected = 0.9**20 * start + sum(0.1 * 0.9 ** (19 - k) * weights[k] for k in range(20))
    np.testing.assert_allclose(references[-1], expected, 1e-13)


def test_reference_becomes_the_policy_every_few_steps() -> None:
    reference, seen = tree(100), []
    refresh = jax.jit(lambda r, p, step: kljax.refreshed_reference(r, p, step, every=3))
    for step in range(8):
        reference = refresh(reference, tree(step), step)
        chex.assert_trees_all_equal_shapes_and_dtypes(reference, tree(0))
        seen.append(int(reference.adapter["rank"]))
    assert seen == [100, 100, 100, 3, 3, 3, 6, 6]
    chex.assert_trees_all_equal(reference, tree(6))
    wide = {"w": jnp.ones(2, jnp.float32)}
    selected = kljax.refreshed_reference({"w": jnp.zeros(2, jnp.bfloat16)}, wide, jnp.uint32(2), every=jnp.int32(2))
    assert selected["w"].dtype == jnp.bfloat16
    chex.assert_trees_all_equal(selected["w"], jnp.ones(2, jnp.bfloat16))


def test_mixed_every_few_steps_equals_trl() -> None:
    alpha, every = 0.6, 4
    policies = RNG.normal(size=13)
    reference = expected = jnp.asarray(1.0)

    @jax.jit
    def update(reference: jax.Array, policy: jax.Array, step: jax.Array) -> jax.Array:
        mixed = kljax.ema_reference(reference, policy, decay=1 - alpha)
        return kljax.refreshed_reference(reference, mixed, step, every=every)

    for step in range(1, 13):
        reference = update(reference, policies[step], step)
        if step % every == 0:
            expected = (1 - alpha) * expected + alpha * policies[step]
        np.testing.assert_allclose(reference, expected, 1e-14)


def test_layouts_are_preserved_and_donated_buffers_reused() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    old, new = (jax.device_put({"w": jnp.full((8, 4), v), "b": jnp.full(8, v)}, rows) for v in (0.0, 1.0))

    def update(reference: Any, params: Any, step: jax.Array) -> Any:
        mixed = kljax.ema_reference(reference, params, decay=0.75)
        return kljax.refreshed_reference(reference, mixed, step, every=2)

    compiled = jax.jit(update, donate_argnums=0).lower(old, new, 2).compile()
    # Of 8 devices each holds a row of the reference, whose bytes the result takes over.
    assert compiled.memory_analysis().alias_size_in_bytes == 5 * 8
    got = compiled(old, new, 2)
    assert old["w"].is_deleted()
    for name, leaf in got.items():
        assert leaf.sharding.is_equivalent_to(rows, leaf.ndim)
        np.testing.assert_array_equal(leaf, np.full(new[name].shape, 0.25))


def test_mismatched_updates_are_named() -> None:
    with pytest.raises(ValueError, match=r"decay: got 1\.5, expected a number <= 1"):
        kljax.ema_reference(tree(0), tree(1), decay=1.5)
    with pytest.raises(ValueError, match=r"decay: got -0\.5"):
        kljax.ema_reference(tree(0), tree(1), decay=-0.5)
    with pytest.raises(ValueError, match="every: got 0, expected a number > 0"):
        kljax.refreshed_reference(tree(0), tree(1), 3, every=0)
    for function in (
        lambda old, new: kljax.ema_reference(old, new, decay=0.5),
        lambda old, new: kljax.refreshed_reference(old, new, 1, every=1),
    ):
        with pytest.raises(ValueError, match=r"params\['a'\]\['b'\]: got shape \[1\], expected \[3\]"):
            function({"a": {"b": jnp.ones(3)}}, {"a": {"b": jnp.ones(1)}})
        with pytest.raises(ValueError, match="key"):
            function({"a": jnp.ones(3)}, {"b": jnp.ones(3)})


def test_bema_follows_its_recursion() -> None:
    """TRL's loop: the average first, then the correction by the whole way so far; integers come from the policy."""
    rng = np.random.default_rng(0)
    start = {"w": rng.normal(size=3), "n": np.array([1, 2])}
    average = start
    mean = start["w"].copy()
    for step in (1, 2, 5):
        params = {"w": rng.normal(size=3), "n": np.array([step, 0])}
        rate, correction = (10 + 2.0 * step) ** -0.5, (10 + 2.0 * step) ** -0.3
        mean = (1 - rate) * mean + rate * params["w"]
        average, reference = kljax.bema_reference(average, params, start, step, bias_power=0.3, multiplier=2.0)
        np.testing.assert_allclose(average["w"], mean, 1e-12)
        np.testing.assert_allclose(reference["w"], mean + correction * (params["w"] - start["w"]), 1e-12)
        np.testing.assert_array_equal(reference["n"], params["n"])


def test_bema_ends_are_the_policy_and_the_average() -> None:
    start, params = {"w": np.zeros(2)}, {"w": np.ones(2)}
    average, _ = kljax.bema_reference(start, params, start, 3, power=0.0)
    np.testing.assert_array_equal(average["w"], params["w"])
    average, reference = kljax.bema_reference(start, params, start, 3, bias_power=400.0, min_rate=0.5)
    np.testing.assert_array_equal(reference["w"], average["w"])
    np.testing.assert_array_equal(average["w"], 0.5)
    with pytest.raises(ValueError, match=r"lag: got 0\.0"):
        kljax.bema_reference(start, params, start, 3, lag=0.0)
