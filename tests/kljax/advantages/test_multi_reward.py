import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.kljax.advantages.group_rows import GROUPS, IDS, REAL

RNG = np.random.default_rng(0)
REWARDS = np.where(REAL[:, None], RNG.normal(size=(len(IDS), 3)) * np.array([1.0, 50.0, 0.1]), np.nan)
WEIGHTS = np.array([1.0, 0.5, 2.0])


def by_hand(there: np.ndarray, *, eps: float, scale: bool = True) -> np.ndarray:
    """A loop over rows and rewards; `there` says which rewards a row has."""
    result = np.zeros(len(IDS))
    for i in np.flatnonzero(REAL):
        for k in range(3):
            members = np.flatnonzero((IDS[i] == IDS) & there[:, k])
            if there[i, k] and len(members) > 1:
                r = REWARDS[members, k]
                divisor = r.std(ddof=1) + eps if scale else 1.0
                result[i] += WEIGHTS[k] * (REWARDS[i, k] - r.mean()) / divisor
    return result


@pytest.mark.parametrize("scale", ["std", "none"])
def test_each_reward_is_compared_by_itself(scale: str) -> None:
    got = jax.jit(lambda r: kljax.gdpo_advantages(r, IDS, num_groups=GROUPS, weights=WEIGHTS, scale=scale))(REWARDS)
    everything = np.broadcast_to(REAL[:, None], REWARDS.shape)
    np.testing.assert_allclose(got, by_hand(everything, eps=1e-6, scale=scale == "std"), 1e-12, 1e-14)


def test_normalized_over_rows_as_trl_has_it() -> None:
    options = {"weights": WEIGHTS, "eps": 1e-4, "normalize": "rows"}
    total = by_hand(np.broadcast_to(REAL[:, None], REWARDS.shape), eps=1e-4)
    expected = np.where(REAL, (total - total[REAL].mean()) / (total[REAL].std(ddof=1) + 1e-4), 0)

    @jax.jit
    def both(rewards: jax.Array) -> list[jax.Array]:
        marked = kljax.Groups(np.where(REAL, IDS, 0), GROUPS, REAL)
        by_id = kljax.gdpo_advantages(rewards, IDS, num_groups=GROUPS, **options)
        return [by_id, kljax.gdpo_advantages(rewards, marked, **options)]

    for got in both(REWARDS):
        np.testing.assert_allclose(got, expected, 1e-12, 1e-14)


def test_missing_reward_leaves_its_row_the_others() -> None:
    there = np.array(np.broadcast_to(REAL[:, None], REWARDS.shape))
    there[0, 1] = there[4, :] = False
    compare = jax.jit(kljax.gdpo_advantages, static_argnames="normalize")
    options, groups = {"weights": WEIGHTS, "eps": 1e-4}, kljax.Groups(IDS, GROUPS, there)
    got = compare(np.where(there, REWARDS, np.nan), groups, **options)
    np.testing.assert_allclose(got, by_hand(there, eps=1e-4), 1e-12, 1e-14)
    assert got[4] == 0
    assert got[0] != 0
    rows = REAL & there.any(1)
    total = by_hand(there, eps=1e-4)
    normalized = compare(REWARDS, groups, **options, normalize="rows")
    expected = np.where(rows, (total - total[rows].mean()) / (total[rows].std(ddof=1) + 1e-4), 0)
    np.testing.assert_allclose(normalized, expected, 1e-12, 1e-14)


def test_single_reward_is_grpo_and_scales_cancel() -> None:
    single = kljax.gdpo_advantages(REWARDS[:, :1], IDS, num_groups=GROUPS, singleton="reward")
    np.testing.assert_array_equal(
        single, kljax.grpo_advantages(REWARDS[:, 0], IDS, num_groups=GROUPS, singleton="reward")
    )
    larger = kljax.gdpo_advantages(REWARDS * np.array([1.0, 1e3, 1.0]), IDS, num_groups=GROUPS, eps=0.0)
    np.testing.assert_allclose(larger, kljax.gdpo_advantages(REWARDS, IDS, num_groups=GROUPS, eps=0.0), 1e-9, 1e-9)


def test_gradients_are_finite_and_dtypes_follow() -> None:
    @jax.jit
    def advantages(r: jax.Array) -> jax.Array:
        return kljax.gdpo_advantages(r, IDS, num_groups=GROUPS, normalize="rows")

    gradient = jax.jit(jax.grad(lambda r: jnp.square(advantages(r)).sum()))(REWARDS)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[~REAL], 0)
    assert jax.eval_shape(advantages, REWARDS.astype(np.float32)).dtype == jnp.float32


def test_unknown_group_is_nan_in_its_row_alone() -> None:
    ids = np.where(np.arange(len(IDS)) == 0, GROUPS, IDS)
    with pytest.raises(ValueError, match="group_ids: got 4, expected ids below num_groups = 4"):
        kljax.gdpo_advantages(REWARDS, ids, num_groups=GROUPS)
    got = jax.jit(lambda ids: kljax.gdpo_advantages(REWARDS, ids, num_groups=GROUPS, normalize="rows"))(ids)
    np.testing.assert_array_equal(np.isnan(got), np.arange(len(IDS)) == 0)


def test_errors_name_the_argument() -> None:
    r, ids = np.zeros((3, 2)), np.zeros(3, int)
    with pytest.raises(ValueError, match=r"rewards: got shape \[3\], expected \[B, K\]"):
        kljax.gdpo_advantages(r[:, 0], ids, num_groups=1)
    with pytest.raises(ValueError, match=r"weights: got shape \[3\], expected \[2\]"):
        kljax.gdpo_advantages(r, ids, num_groups=1, weights=np.ones(3))
    with pytest.raises(ValueError, match=r"group_ids.valid: got shape \[3, 4\]"):
        kljax.gdpo_advantages(r, kljax.Groups(ids, 1, np.ones((3, 4), bool)))
    with pytest.raises(ValueError, match="normalize: got 'batch'"):
        kljax.gdpo_advantages(r, ids, num_groups=1, normalize="batch")
    with pytest.raises(ValueError, match="scale: got 'row'"):
        kljax.gdpo_advantages(r, ids, num_groups=1, scale="row")
