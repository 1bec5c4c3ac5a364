import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import kljax
from tests.masks import MASK, ROWS, draw

ADVANTAGES, LP, REF = draw(1.0, 1.0, 1.0)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_the_shift_is_the_distance_to_the_mean(estimator: str) -> None:
    kl = np.asarray(kljax.estimate_kl(LP, REF, estimator=estimator))
    mean = kl[MASK].mean()
    got, mean_kl = kljax.centered_kl_advantages(ADVANTAGES, LP, REF, MASK, coef=0.3, estimator=estimator)
    np.testing.assert_allclose(mean_kl, mean, 1e-12)
    np.testing.assert_allclose(got, np.where(MASK, ADVANTAGES + 0.3 * (mean - kl), 0), 1e-12, 1e-14)


def test_rows_are_broadcast_to_their_tokens() -> None:
    rows = ADVANTAGES[:, 0]
    got, _ = kljax.centered_kl_advantages(rows, LP, REF, MASK, coef=0.3)
    tokens = kljax.broadcast_to_tokens(rows, MASK)
    np.testing.assert_array_equal(got, kljax.centered_kl_advantages(tokens, LP, REF, MASK, coef=0.3)[0])


def test_the_kl_is_detached() -> None:
    def total(lp: jax.Array, ref: jax.Array) -> jax.Array:
        advantages, mean_kl = kljax.centered_kl_advantages(ADVANTAGES, lp, ref, MASK, coef=0.3, estimator="k2")
        return jnp.square(advantages).sum() + mean_kl

    for grad in jax.grad(total, argnums=(0, 1))(jnp.asarray(LP), jnp.asarray(REF)):
        np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("split", [[0, 6], [0, 1, 6], [0, 3, 5, 6], list(range(7))], ids=str)
@pytest.mark.parametrize("as_value", [False, True])
def test_micro_batches_use_the_mean_of_the_batch(split: list[int], as_value: bool) -> None:
    full, whole_mean = kljax.centered_kl_advantages(ADVANTAGES, LP, REF, MASK, coef=0.3)
    parts = [slice(*pair) for pair in itertools.pairwise(split)]
    sums = [kljax.WeightedSum.of(kljax.estimate_kl(LP[p], REF[p], MASK[p], estimator="k1"), MASK[p]) for p in parts]
    mean = functools.reduce(lambda a, b: a + b, sums)
    mean = mean.value() if as_value else mean
    got = [kljax.centered_kl_advantages(ADVANTAGES[p], LP[p], REF[p], MASK[p], coef=0.3, mean_kl=mean) for p in parts]
    np.testing.assert_allclose(jnp.concatenate([advantages for advantages, _ in got]), full, 1e-12, 1e-14)
    for _, mean_kl in got:
        np.testing.assert_allclose(mean_kl, whole_mean, 1e-12)
    np.testing.assert_allclose(
        sum((a - kljax.masked(ADVANTAGES[p], MASK[p])).sum() for (a, _), p in zip(got, parts, strict=True)),
        0,
        atol=1e-12,
    )


def test_devices_share_the_mean_over_the_named_axis() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows, scalar = PartitionSpec("data"), PartitionSpec()

    def shift(advantages, lp, ref, mask):
        return kljax.centered_kl_advantages(advantages, lp, ref, mask, coef=0.3, axis_name="data")

    sharded = jax.jit(jax.shard_map(shift, mesh=mesh, in_specs=(rows, rows, rows, rows), out_specs=(rows, scalar)))
    got, mean_kl = sharded(ADVANTAGES, LP, REF, MASK)
    expected, expected_mean = kljax.centered_kl_advantages(ADVANTAGES, LP, REF, MASK, coef=0.3)
    np.testing.assert_allclose(got, expected, 1e-12, 1e-14)
    np.testing.assert_allclose(mean_kl, expected_mean, 1e-12)


def test_coefficient_zero_leaves_advantages_with_infinite_kl() -> None:
    ref = REF.copy()
    ref[1, 2] = -np.inf
    got, _ = jax.jit(lambda coef: kljax.centered_kl_advantages(ADVANTAGES, LP, ref, MASK, coef=coef))(0.0)
    np.testing.assert_array_equal(got, np.where(MASK, ADVANTAGES, 0))


def test_a_batch_without_tokens() -> None:
    got, mean_kl = kljax.centered_kl_advantages(ADVANTAGES, LP, REF, np.zeros_like(MASK), coef=0.3)
    np.testing.assert_array_equal(got, 0)
    assert mean_kl == 0


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="axis_name: has no meaning with mean_kl"):
        kljax.centered_kl_advantages(ADVANTAGES, LP, REF, MASK, coef=0.3, mean_kl=0.1, axis_name="data")
    with pytest.raises(ValueError, match="coef: got -1"):
        kljax.centered_kl_advantages(ADVANTAGES, LP, REF, MASK, coef=-1)
    with pytest.raises(ValueError, match=rf"advantages: got shape \[3\], expected \[{ROWS}\]"):
        kljax.centered_kl_advantages(np.zeros(3), LP, REF, MASK, coef=0.3)
