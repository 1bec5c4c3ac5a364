import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.kljax.advantages.group_rows import GROUPS, IDS, REAL, REWARDS, dtype_of
from tests.masks import MASK, check_masked, draw

LENGTHS = np.array([3, 1, 7, 2, 0, 5, 4, 9, 9])
TOKENS = np.arange(9)[::-1] < LENGTHS[:, None]

FUNCTIONS = {
    "grpo": kljax.grpo_advantages,
    "centered": kljax.reinforce_plus_plus_baseline_advantages,
    "rloo": kljax.rloo_advantages,
    "opo": lambda r, groups, **kw: kljax.opo_advantages(r, groups, TOKENS, **kw),
}


def by_hand(name: str, *, singleton: str = "zero") -> np.ndarray:
    """Each row compared with the rows of its group, one at a time."""
    result = np.zeros(len(IDS))
    for i in np.flatnonzero(REAL):
        members = np.flatnonzero(IDS[i] == IDS)
        r = REWARDS[members]
        if len(members) == 1:
            result[i] = 0 if singleton == "zero" else r[0] / (1 + 1e-6 if name == "grpo" else 1)
        elif name == "grpo":
            result[i] = (REWARDS[i] - r.mean()) / (r.std(ddof=1) + 1e-6)
        elif name == "centered":
            result[i] = REWARDS[i] - r.mean()
        elif name == "rloo":
            result[i] = REWARDS[i] - REWARDS[members[members != i]].mean()
        else:
            result[i] = REWARDS[i] - np.average(r, weights=LENGTHS[members])
    return result


@pytest.mark.parametrize("singleton", ["zero", "reward"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_row_is_compared_with_its_group(name: str, singleton: str) -> None:
    got = jax.jit(lambda r: FUNCTIONS[name](r, kljax.Groups(IDS, GROUPS), singleton=singleton))(REWARDS)
    np.testing.assert_allclose(got, by_hand(name, singleton=singleton), 1e-12, 1e-14)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_padding_rows_are_left_out(name: str) -> None:
    marked = FUNCTIONS[name](REWARDS, kljax.Groups(np.where(REAL, IDS, 1), GROUPS, REAL))
    np.testing.assert_array_equal(marked, FUNCTIONS[name](REWARDS, kljax.Groups(IDS, GROUPS)))
    without = jax.jit(jax.grad(lambda r: jnp.square(FUNCTIONS[name](r, kljax.Groups(IDS, GROUPS))).sum()))(REWARDS)
    assert np.isfinite(without).all()
    np.testing.assert_array_equal(without[~REAL], 0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_rewards_have_zero_advantage_and_finite_gradient(name: str) -> None:
    @jax.jit
    def value_and_slope(r: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, pull = jax.vjp(lambda r: FUNCTIONS[name](r, kljax.Groups(np.where(REAL, 0, -1), 1)), r)
        return value, pull(jnp.ones_like(value))[0]

    value, slope = value_and_slope(np.full(len(IDS), 0.1, np.float32))  # the float32 mean of seven 0.1 is not 0.1
    np.testing.assert_array_equal(value, 0)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_low_precision_rewards_give_float32(name: str) -> None:
    assert dtype_of(lambda r: FUNCTIONS[name](r, kljax.Groups(IDS, GROUPS)), jnp.bfloat16) == jnp.float32
    assert dtype_of(lambda r: FUNCTIONS[name](r, kljax.Groups(IDS, GROUPS)), jnp.float64) == jnp.float64


def test_grpo_options() -> None:
    r, ids = np.array([1.0, 2.0, 4.0]), np.zeros(3, int)
    centered = r - r.mean()
    got = kljax.grpo_advantages(r, ids, num_groups=1, ddof=0, eps=1e-4)
    np.testing.assert_allclose(got, centered / (r.std() + 1e-4), 1e-14)
    np.testing.assert_allclose(kljax.grpo_advantages(r, ids, num_groups=1, scale="none"), centered, 1e-14)
    np.testing.assert_allclose(kljax.grpo_advantages(r, ids, num_groups=1, eps=0.0), centered / r.std(ddof=1), 1e-14)


def test_grpo_divided_by_the_deviation_of_the_batch() -> None:
    real = REWARDS[REAL]
    centred = by_hand("centered")
    for ddof in (0, 1):
        got = kljax.grpo_advantages(REWARDS, IDS, num_groups=GROUPS, scale="batch_std", ddof=ddof, eps=1e-4)
        np.testing.assert_allclose(got, centred / (real.std(ddof=ddof) + 1e-4), 1e-12, 1e-14)
    alone = kljax.grpo_advantages(REWARDS, IDS, num_groups=GROUPS, scale="batch_std", singleton="reward")
    np.testing.assert_allclose(alone[3], 3.0 / (real.std(ddof=1) + 1e-6), 1e-12)
    one_row = kljax.grpo_advantages(np.array([2.0]), np.zeros(1, int), num_groups=1, scale="batch_std", eps=0.0)
    np.testing.assert_array_equal(one_row, 0)


def test_grpo_divided_by_the_mean_of_the_group() -> None:
    got = kljax.grpo_advantages(REWARDS, IDS, num_groups=GROUPS, scale="mean", eps=1e-6, singleton="reward")
    expected = by_hand("centered", singleton="reward")
    for group in (0, 1):
        expected[group == IDS] /= REWARDS[group == IDS].mean() + 1e-6
    np.testing.assert_allclose(got, expected, 1e-12, 1e-14)
    balanced = kljax.grpo_advantages(np.array([1.0, -1.0]), np.zeros(2, int), num_groups=1, scale="mean", eps=0.0)
    np.testing.assert_array_equal(balanced, 0)


@pytest.mark.parametrize("scale", ["batch_std", "mean"])
def test_other_scales_have_finite_gradients_among_equals(scale: str) -> None:
    @jax.jit
    def value_and_slope(r: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, pull = jax.vjp(lambda r: kljax.grpo_advantages(r, IDS, num_groups=GROUPS, scale=scale, eps=0.0), r)
        return value, pull(2 * value)[0]

    _, slope = value_and_slope(REWARDS)
    assert np.isfinite(slope).all()
    np.testing.assert_array_equal(slope[~REAL], 0)
    for constant in (0.0, 0.1):
        value, slope = value_and_slope(np.full(len(IDS), constant, np.float32))
        np.testing.assert_array_equal(value, 0)
        assert np.isfinite(slope).all()


def test_group_without_tokens_has_no_baseline() -> None:
    got = kljax.opo_advantages(np.array([1.0, 2.0]), np.zeros(2, int), np.zeros((2, 3), bool), num_groups=1)
    np.testing.assert_array_equal(got, 0)


def test_id_outside_the_groups_raises_or_gives_nan() -> None:
    r, ids = np.array([1.0, 2.0, 3.0]), np.array([0, 0, 1])
    with pytest.raises(ValueError, match="group_ids: got 1, expected ids below num_groups = 1"):
        kljax.grpo_advantages(r, ids, num_groups=1)
    under_jit = jax.jit(lambda ids: kljax.grpo_advantages(r, ids, num_groups=1, scale="none"))(ids)
    np.testing.assert_allclose(under_jit, [-0.5, 0.5, np.nan])


def test_narrow_group_ids_have_many_groups() -> None:
    got = kljax.rloo_advantages(np.array([1.0, 0.0]), np.array([7, 7], np.int8), num_groups=300)
    np.testing.assert_array_equal(got, [1, -1])


def test_broadcast_to_tokens() -> None:
    rows = np.arange(1.0, len(MASK) + 1)
    np.testing.assert_array_equal(kljax.broadcast_to_tokens(rows, MASK), np.where(MASK, rows[:, None], 0))
    per_row = jax.grad(lambda a: kljax.broadcast_to_tokens(a, MASK).sum())(jnp.asarray(rows))
    np.testing.assert_array_equal(per_row, MASK.sum(-1))
    empty = np.where(np.arange(len(MASK)) == 0, np.nan, rows)
    assert np.isfinite(kljax.broadcast_to_tokens(empty, MASK)).all()
    (tokens,) = draw(1.0)
    check_masked(lambda a: kljax.broadcast_to_tokens(a.sum(-1, where=MASK), MASK), [tokens])


def test_errors_name_the_argument() -> None:
    r, ids = np.zeros(3), np.zeros(3, int)
    with pytest.raises(ValueError, match="singleton: got 'one'"):
        kljax.rloo_advantages(r, ids, num_groups=1, singleton="one")
    with pytest.raises(ValueError, match="scale: got 'batch'"):
        kljax.grpo_advantages(r, ids, num_groups=1, scale="batch")
    with pytest.raises(ValueError, match="ddof: got 2"):
        kljax.grpo_advantages(r, ids, num_groups=1, ddof=2)
    with pytest.raises(ValueError, match="num_groups: got 0"):
        kljax.grpo_advantages(r, ids, num_groups=0)
    with pytest.raises(ValueError, match=r"rewards: got shape \[3, 1\]"):
        kljax.grpo_advantages(r[:, None], ids, num_groups=1)
    with pytest.raises(TypeError, match="group_ids: got dtype float64"):
        kljax.grpo_advantages(r, r, num_groups=1)
    for mask in (np.ones(3, int), np.ones((2, 4), int), np.ones((3, 4, 1), int)):
        with pytest.raises(ValueError, match=r"mask: got shape .*, expected \[3, T\], the tokens of each row"):
            kljax.opo_advantages(r, ids, mask, num_groups=1)
    with pytest.raises(ValueError, match="shapes differ: rewards"):
        kljax.opo_advantages(r, np.zeros((3, 4), int), np.ones((3, 4), int), num_groups=1)
    with pytest.raises(ValueError, match=r"advantages: got shape \[3\], expected \[6\]"):
        kljax.broadcast_to_tokens(r, MASK)


def test_errors_about_groups_name_the_field() -> None:
    r, ids = np.zeros(3), np.zeros(3, int)
    with pytest.raises(ValueError, match=r"groups\.count: got 0, expected a number >= 1"):
        kljax.Groups(ids, 0)
    with pytest.raises(ValueError, match="num_groups: got None, expected the number of groups"):
        kljax.rloo_advantages(r, ids)
    with pytest.raises(ValueError, match=r"num_groups: has no meaning with kljax\.Groups"):
        kljax.rloo_advantages(r, kljax.Groups(ids, 1), num_groups=1)
    with pytest.raises(ValueError, match=r"group_ids\.ids: got 1, expected ids below group_ids\.count = 1"):
        kljax.rloo_advantages(r, kljax.Groups(ids + 1, 1))
    with pytest.raises(ValueError, match=r"shapes differ: group_ids\.ids \[3\], group_ids\.valid \[2\]"):
        kljax.rloo_advantages(r, kljax.Groups(ids, 1, np.ones(2, bool)))
    with pytest.raises(TypeError, match=r"group_ids\.ids: got dtype float64"):
        kljax.rloo_advantages(r, kljax.Groups(r, 1))


def test_invalid_row_may_have_any_id() -> None:
    rewards, ids = np.array([1.0, 0.0, 9.0]), np.array([0, 0, 7], np.uint8)
    got = kljax.rloo_advantages(rewards, kljax.Groups(ids, 1, np.array([True, True, False])))
    np.testing.assert_array_equal(got, [1, -1, 0])
