"""Token weights against loops over rows and prompts; sums on their way; errors."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import kljax
from kljax.aggregation import EMPTY_ROWS, MODES
from tests import oracles

ROWS, LENGTH, PROMPTS = 6, 4, 4
CLOSE = {"rtol": 1e-13, "atol": 1e-15}


def needed(mode: str, group_ids: np.ndarray) -> dict[str, object]:
    if mode == "seq_mean_token_sum_norm":
        return {"max_length": 7.0}
    return {"group_ids": jnp.asarray(group_ids), "num_groups": PROMPTS} if mode == "prompt_mean" else {}


@pytest.mark.parametrize("empty_rows", EMPTY_ROWS)
@pytest.mark.parametrize("mode", MODES)
@given(mask=oracles.masks(ROWS, LENGTH), group_ids=st.lists(st.integers(0, PROMPTS - 1), min_size=ROWS, max_size=ROWS))
def test_weights_by_loops(mode: str, empty_rows: str, mask: np.ndarray, group_ids: list[int]) -> None:
    ids = np.array(group_ids)
    weights = kljax.token_weights(mask, mode=mode, empty_rows=empty_rows, **needed(mode, ids))
    expected = oracles.token_weights(mask, mode, max_length=7.0, group_ids=ids, count=empty_rows == "count")
    chex.assert_trees_all_close(np.asarray(weights), expected, **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_is_the_weighted_sum_of_values(mode: str) -> None:
    mask = jnp.asarray(oracles.MASK_KINDS)
    arguments = {"mode": mode, **needed(mode, np.array([0, 1, 1, 2, 2, 2]))}
    values = jnp.where(mask, jax.random.normal(jax.random.key(0), mask.shape, jnp.float64), jnp.nan)
    value, grad = jax.value_and_grad(lambda v: kljax.aggregate(v, mask, **arguments))(values)
    weights = kljax.token_weights(mask, **arguments)
    chex.assert_trees_all_equal(grad, weights)
    chex.assert_trees_all_close(value, np.nansum(np.asarray(values) * np.asarray(weights)), rtol=1e-13)
    assert weights.dtype == jnp.float64


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
def test_a_mean_of_ones_is_one(mode: str) -> None:
    mask = jnp.asarray(oracles.MASK_KINDS)
    arguments = {"mode": mode, **needed(mode, np.array([0, 1, 1, 2, 2, 2]))}
    chex.assert_trees_all_close(kljax.aggregate(jnp.ones(mask.shape), mask, **arguments), jnp.ones(()), rtol=1e-14)


@pytest.mark.parametrize("empty_rows", EMPTY_ROWS)
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_tokens_is_zero(mode: str, empty_rows: str) -> None:
    # verl 0.9.1 gives NaN for an all-masked batch in every mode but token-sum, OpenRLHF's masked_mean too.
    values, mask = jnp.full((2, 12), jnp.nan), jnp.zeros((2, 12), bool)
    arguments = {"mode": mode, "empty_rows": empty_rows, **needed(mode, np.array([0, 1]))}
    value, grad = jax.value_and_grad(lambda v: kljax.aggregate(v, mask, **arguments))(values)
    chex.assert_trees_all_equal((value, grad), (jnp.zeros(()), jnp.zeros((2, 12))))


def test_reductions_equal_the_numbers_of_systems() -> None:
    # values 1, rows [1, 1, 0] and [0, 0, 0]: Trinity counts the empty row (1, 0.5), verl drops it (2, 1).
    mask, ones = jnp.array([[1, 1, 0], [0, 0, 0]]), jnp.ones((2, 3))
    for rule, expected in (("count", (1.0, 0.5)), ("drop", (2.0, 1.0))):
        actual = tuple(
            kljax.aggregate(ones, mask, mode=mode, empty_rows=rule).item()
            for mode in ("seq_mean_token_sum", "seq_mean_token_mean")
        )
        assert actual == expected


COUNTED = [mode for mode in MODES if mode != "token_sum"]


@pytest.mark.parametrize("mode", COUNTED)
@given(mask=oracles.masks(ROWS, LENGTH), group_ids=st.lists(st.integers(0, PROMPTS - 1), min_size=ROWS, max_size=ROWS))
def test_denominator_replaces_the_count(mode: str, mask: np.ndarray, group_ids: list[int]) -> None:
    ids = np.array(group_ids)
    weights = kljax.token_weights(mask, mode=mode, denominator=7.5, **needed(mode, ids))
    expected = np.zeros(mask.shape)
    for i, t in zip(*np.nonzero(mask), strict=True):
        within = {
            "seq_mean_token_mean": mask[i].sum(),
            "seq_mean_token_sum_norm": 7.0,
            "prompt_mean": mask[ids == ids[i]].sum(),
        }
        expected[i, t] = 1 / (7.5 * within.get(mode, 1))
    chex.assert_trees_all_close(weights, expected, **CLOSE)
    # The number that would have been counted changes nothing.
    counted = {
        "token_mean": mask.sum(),
        "prompt_mean": len({j for j in set(group_ids) if mask[ids == j].any()}),
    }.get(mode, mask.any(1).sum())
    if counted:
        local_weights = kljax.token_weights(mask, mode=mode, denominator=float(counted), **needed(mode, ids))
        chex.assert_trees_all_close(local_weights, kljax.token_weights(mask, mode=mode, **needed(mode, ids)), **CLOSE)


def test_traced_denominator_of_zero_leaves_no_weight() -> None:
    mask = jnp.ones((2, 3), bool)
    weigh = jax.jit(lambda n: kljax.token_weights(mask, mode="token_mean", denominator=n))
    chex.assert_trees_all_close(weigh(jnp.int32(4)), jnp.full((2, 3), 0.25))
    chex.assert_trees_all_equal(weigh(0.0), jnp.zeros((2, 3)))


def test_rows_outside_every_group_weigh_nothing() -> None:
    mask = jnp.ones((3, 2), bool)
    weights = kljax.token_weights(mask, mode="prompt_mean", group_ids=jnp.array([0, -1, 5]), num_groups=2)
    chex.assert_trees_all_equal(weights, jnp.array([[0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]))


def test_leading_axes_are_batches_of_their_own() -> None:
    masks = jnp.stack([jnp.asarray(oracles.MASK_KINDS), jnp.asarray(oracles.MASK_KINDS[::-1])])
    ids = jnp.array([[0, 0, 1, 1, 2, 2], [2, 1, 0, 2, 1, 0]])
    for mode in MODES:
        arguments = {"mode": mode, **({"max_length": 3.0} if "norm" in mode else {})}
        if mode == "prompt_mean":
            both = kljax.token_weights(masks, group_ids=ids, num_groups=3, **arguments)
            each = [
                kljax.token_weights(m, group_ids=i, num_groups=3, **arguments) for m, i in zip(masks, ids, strict=True)
            ]
        else:
            both = kljax.token_weights(masks, **arguments)
            each = [kljax.token_weights(m, **arguments) for m in masks]
        chex.assert_trees_all_close(both, jnp.stack(each), **CLOSE)


def test_value_dtypes_and_traced_max_length_are_accepted() -> None:
    mask = jnp.ones((2, 3), bool)
    for dtype, expected in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32), (jnp.float64, jnp.float64)):
        assert kljax.aggregate(jnp.ones((2, 3), dtype), mask, mode="token_mean").dtype == expected
    jitted = jax.jit(lambda n: kljax.aggregate(jnp.ones((2, 3)), mask, mode="seq_mean_token_sum_norm", max_length=n))
    chex.assert_trees_all_close(jitted(6.0), jnp.asarray(0.5))


@given(mask=oracles.masks(ROWS, LENGTH), cut=st.integers(0, ROWS), seed=st.integers(0, 100))
def test_weighted_sums_add_to_the_mean(mask: np.ndarray, cut: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, weights = rng.normal(size=mask.shape), rng.uniform(0.5, 2.0, mask.shape)
    values[~mask] = np.nan
    parts = [kljax.WeightedSum.of(values[s], mask[s], weights[s]) for s in (slice(0, cut), slice(cut, None))]
    total = parts[0] + parts[1]
    expected = np.average(values[mask], weights=weights[mask]) if mask.any() else 0.0
    chex.assert_trees_all_close(total.value(), jnp.asarray(expected), rtol=1e-12, atol=1e-14)
    unweighted = kljax.WeightedSum.of(values, mask)
    chex.assert_trees_all_close(unweighted.value(), kljax.masked_mean(values, mask), rtol=1e-13)


def test_weighted_sum_is_a_pytree_without_a_gradient() -> None:
    mask = jnp.ones(3, bool)
    metric = jax.jit(lambda v: kljax.WeightedSum.of(v, mask))(jnp.arange(3.0))
    assert isinstance(metric, kljax.WeightedSum)
    assert len(jax.tree.leaves(metric)) == 2
    grad = jax.grad(lambda v: kljax.WeightedSum.of(v, mask).value())(jnp.arange(3.0))
    chex.assert_trees_all_equal(grad, jnp.zeros(3))
    narrow = kljax.WeightedSum.of(jnp.arange(3, dtype=jnp.float32), mask)
    chex.assert_trees_all_equal((kljax.WeightedSum.zero() + narrow).value(), jnp.float32(1))
    chex.assert_trees_all_equal(kljax.WeightedSum.zero().value(), jnp.float32(0))


MASK = jnp.ones((2, 3), bool)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"mode": "token-mean"},
            r"mode: got 'token-mean', expected one of token_mean, .*; did you mean 'token_mean'\?",
        ),
        ({"mode": "token_mean", "empty_rows": "dorp"}, r"empty_rows: got 'dorp', expected one of drop, count; did you"),
        ({"mode": "seq_mean_token_sum_norm"}, r"max_length: got None, but mode 'seq_mean_token_sum_norm' needs it"),
        ({"mode": "seq_mean_token_sum_norm", "max_length": 0}, r"max_length: got 0, expected a number > 0"),
        ({"mode": "prompt_mean", "num_groups": 2}, r"group_ids: got None, but mode 'prompt_mean' needs it"),
        (
            {"mode": "prompt_mean", "group_ids": jnp.zeros(2, int)},
            r"num_groups: got None, expected the number of groups beside group_ids, or kljax.Groups",
        ),
        ({"mode": "token_mean", "max_length": 3}, r"max_length: has no meaning in mode 'token_mean'"),
        ({"mode": "token_sum", "denominator": 3}, r"denominator: has no meaning in mode 'token_sum'"),
        ({"mode": "token_mean", "denominator": 0}, r"denominator: got 0, expected a number > 0"),
        ({"mode": "token_mean", "num_groups": 3}, r"num_groups: has no meaning in mode 'token_mean'"),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kljax.token_weights(MASK, **arguments)
    with pytest.raises(ValueError, match=message):
        kljax.aggregate(jnp.ones((2, 3)), MASK, **arguments)


def test_shape_and_dtype_errors() -> None:
    with pytest.raises(ValueError, match=r"values \[3, 2\], mask \[2, 3\]"):
        kljax.aggregate(jnp.ones((3, 2)), MASK, mode="token_mean")
    with pytest.raises(TypeError, match="mask: got dtype float64"):
        kljax.token_weights(jnp.ones((2, 3)), mode="token_mean")


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1)])
def test_prompts_of_other_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"group_ids {re.escape(str(list(shape)))}, rows \[2\]"):
        kljax.token_weights(MASK, mode="prompt_mean", group_ids=jnp.zeros(shape, int), num_groups=2)


@pytest.mark.parametrize("packed", [False, True])
def test_prompts_are_counted_on_explicit_axes(packed: bool) -> None:
    mask, ids = jnp.asarray(oracles.MASK_KINDS[:4]), jnp.array([0, 1, 1, -1])
    if packed:
        ids = jnp.broadcast_to(ids[:, None], mask.shape)
        mask = kljax.Segments(mask, jnp.where(jnp.arange(mask.shape[-1]) < 7, 0, 1 + 0 * ids))
    weigh = jax.jit(lambda *x: kljax.token_weights(x[0], mode="prompt_mean", group_ids=x[1], num_groups=2))
    by_rows = NamedSharding(jax.make_mesh((2,), ("rows",)), PartitionSpec("rows"))
    chex.assert_trees_all_close(weigh(*jax.device_put((mask, ids), by_rows)), weigh(mask, ids), **CLOSE)


def test_groups_stand_for_the_prompts_of_rows() -> None:
    ids, options = jnp.array([0, 1]), {"mode": "prompt_mean"}
    of_groups = kljax.token_weights(MASK, group_ids=kljax.Groups(ids, 2, jnp.array([True, False])), **options)
    chex.assert_trees_all_equal(
        of_groups, kljax.token_weights(MASK, group_ids=jnp.array([0, -1]), num_groups=2, **options)
    )
    with pytest.raises(ValueError, match=r"group_ids\.axis_name: got 'rows', expected axis_name = None"):
        kljax.token_weights(MASK, group_ids=kljax.Groups(ids, 2, axis_name="rows"), **options)
