"""Every field of a batch goes through slicing and splitting, whatever its name; padding changes no loss."""

import dataclasses
import functools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from tests import rounding, tiny
from train.config.plan import Plan
from train.rl.objective import coefficients, make_objective
from train.rl.preparation import make_preparation
from train.rl.terms import make_token_weights
from train.sequences.batch import (
    Batch,
    map_micro_batches,
    merge_micro_batches,
    micro_batches,
    present_arrays,
    required,
    take_rows,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extended(Batch):
    """A batch of some later version: new fields that no function of `train.sequences.batch` has heard of."""

    images: jax.Array | None = None  # [B, T, 2], per token
    entropies: jax.Array | None = None  # [B, T]
    difficulty: jax.Array | None = None  # [B]
    votes: jax.Array | None = None  # [B, 2]


ROWS, LENGTH = 6, 5
ATTRIBUTES = {field.name: field for field in dataclasses.fields(Extended) if field.name != "fields"}
FIELDS = ATTRIBUTES | {"kept_ids": None}
NEEDED = ("tokens", "token_mask", "completion_mask")
OPTIONAL = sorted(FIELDS.keys() - set(NEEDED))
# As few shapes and dtypes as there may be: each pair of them is compiled for every function.
DTYPES = {"token_mask": bool, "completion_mask": bool, "images": np.uint8, "votes": np.int16}
TRAILING = {"images": (2,), "kept_ids": (2,), "ref_hidden": (2,), "votes": (2,)}


PER_ROW = ("prompt_lengths", "rewards", "group_ids", "episode_rows", "row_numbers", "difficulty", "votes")


def per_row(name: str) -> bool:
    return name in PER_ROW


def padded(batch: Batch, rows: int, columns: int) -> Batch:
    """The batch with empty rows and columns behind: masks False, no group, everything else 0."""

    def pad(name: str, x: jax.Array) -> jax.Array:
        widths = [(0, rows), *([] if per_row(name) else [(0, columns)])]
        fill = -1 if name == "group_ids" else 0
        return jnp.pad(x, [*widths, *[(0, 0)] * (x.ndim - len(widths))], constant_values=fill)

    return dataclasses.replace(batch, **{name: pad(name, x) for name, x in present_arrays(batch).items()})


def field_of(name: str, rows: int, length: int, seed: int) -> jax.Array:
    """Numbers none of which is 0, so that padding can be told from content."""
    shape = ((rows,) if per_row(name) else (rows, length)) + TRAILING.get(name, ())
    dtype = DTYPES.get(name, np.int32)
    if dtype is bool:
        return jnp.ones(shape, bool)
    return jnp.asarray(np.random.default_rng([seed, len(name)]).integers(1, 100, shape).astype(dtype))


def batch_of(names, rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> Extended:
    arrays = {name: field_of(name, rows, length, seed) for name in (*NEEDED, *names)}
    fields = {name: arrays.pop(name) for name in names if name not in ATTRIBUTES}
    return Extended(**arrays, fields=fields)


def each(batch: Extended):
    return {name: np.asarray(value) for name, value in present_arrays(batch).items()}


some_fields = st.lists(st.sampled_from(OPTIONAL), unique=True)
# Few sizes, as every one of them is compiled for every kind of field.
some_rows = st.sampled_from([1, 8]).flatmap(
    lambda count: st.lists(st.integers(0, ROWS - 1), min_size=count, max_size=count)
)


def test_fields_are_batch_fields_and_new_ones():
    added = {"images", "entropies", "difficulty", "votes"}
    assert {field.name for field in dataclasses.fields(Batch)} | added == {*ATTRIBUTES, "fields"}


@functools.cache
def split_and_merged() -> tuple[Extended, Extended, Extended]:
    """A batch with every field; split, and merged again."""

    @jax.jit
    def run(batch: Extended) -> tuple[Extended, Extended]:
        split = micro_batches(batch, 3)
        return split, merge_micro_batches(split)

    batch = batch_of(OPTIONAL)
    return batch, *run(batch)


@pytest.mark.parametrize("name", OPTIONAL)
def test_every_optional_field_survives_micro_batching(name):
    before, split, merged = (each(batch)[name] for batch in split_and_merged())
    assert split.shape == (3, ROWS // 3, *before.shape[1:])
    for part in range(3):
        np.testing.assert_array_equal(split[part], before[part::3])
    np.testing.assert_array_equal(merged, before)
    assert merged.dtype == split.dtype == before.dtype


@hypothesis.given(names=some_fields, rows=some_rows)
def test_rows_are_taken_in_the_requested_order(names, rows):
    batch = batch_of(names)
    taken = take_rows(batch, jnp.asarray(rows))
    chex.assert_trees_all_equal(each(taken), {name: value[rows] for name, value in each(batch).items()})
    chex.assert_trees_all_equal_dtypes(taken, batch)


@hypothesis.given(names=some_fields, count=st.sampled_from([1, 3]))
def test_splitting_and_merging_is_the_identity(names, count):
    batch = batch_of(names)
    split = micro_batches(batch, count)
    assert split.tokens.shape == (count, ROWS // count, LENGTH)
    chex.assert_trees_all_equal(merge_micro_batches(split), batch)


@pytest.mark.parametrize("count", [1, 3])
def test_mapping_the_identity_over_micro_batches_changes_nothing(count):
    batch = batch_of(OPTIONAL)
    chex.assert_trees_all_equal(map_micro_batches(lambda part: part, batch, count), batch)


def test_rows_of_a_group_stay_together():
    batch = batch_of(["rewards"], rows=2 * ROWS)
    split = micro_batches(batch, 2, group=3)
    chex.assert_trees_all_equal(merge_micro_batches(split, group=3), batch)
    chex.assert_trees_all_equal(map_micro_batches(lambda part: part, batch, 2, group=3), batch)
    runs = np.asarray(batch.rewards).reshape(4, 3)
    np.testing.assert_array_equal(split.rewards, [np.concatenate(runs[::2]), np.concatenate(runs[1::2])])
    with pytest.raises(
        ValueError, match=f"got 3, which does not divide the {2 * ROWS} rows of the batch in groups of 3"
    ):
        micro_batches(batch, 3, group=3)


def test_micro_batches_leave_each_device_its_rows():
    # Two devices hold rows 0-2 and 3-5: each micro-batch has to take its share from both.
    rows = micro_batches(batch_of(["rewards"]), 3).rewards
    full = np.asarray(batch_of(["rewards"]).rewards)
    np.testing.assert_array_equal(rows, [full[[0, 3]], full[[1, 4]], full[[2, 5]]])


def test_mismatched_batches_are_reported():
    batch = batch_of([])
    with pytest.raises(ValueError, match="micro_batches: got 4, which does not divide the 6 rows"):
        micro_batches(batch, 4)
    with pytest.raises(ValueError, match="a field of the batch is missing"):
        required(batch.rewards)


CONFIG = tiny.config_of(
    "kl.loss.coef=0.3", "kl.rollout.coef=0.2", "loss.entropy_coef=0.1", "loss.aggregation=seq_mean_token_mean"
)


def test_loss_gradient_and_metrics_ignore_padding():
    model, params = tiny.model_of(CONFIG), tiny.host_params()
    # Log-probs of 264 tokens are about -5.6.
    batch = tiny.full_batch(np.full((tiny.ROWS, tiny.LENGTH), -5.6))
    gradient = jax.jit(jax.value_and_grad(make_objective(Plan.of(CONFIG), model), has_aux=True))

    def results(batch: Batch, params=params):
        weighted = dataclasses.replace(batch, token_weights=make_token_weights(Plan.of(CONFIG))(batch))
        return gradient({"params": params}, None, weighted, coefficients(CONFIG))

    full, wider = results(batch), results(padded(batch, 12 - tiny.ROWS, 3))
    # Values of tokens are 0 in padding, which their sums would show.
    cropped = jax.tree.map(lambda x, like: x[tuple(map(slice, like.shape))], wider[0], full[0])
    chex.assert_trees_all_close(cropped, full[0], rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_equal(*(jax.tree.map(np.count_nonzero, values) for values in (cropped, wider[0])))
    assert float(full[0][0]) != 0
    # A rounding of these weights moves the gradient by 32 roundings: the count of operations knows no amplification.
    bound = rounding.of_weights(lambda moved: results(batch, moved)[1], params, longest_sum=24)
    rounding.assert_close_by_norm(wider[1], full[1], roundings=bound)
    with pytest.raises(AssertionError, match="roundings of the norm"):
        rounding.assert_close_by_norm(rounding.planted(wider[1], roundings=10 * bound), full[1], roundings=bound)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_added_rows_belong_to_no_prompt(estimator):
    config = tiny.config_of(f"advantage.type={estimator}", "advantage.whiten=true")
    batch = tiny.rollout_batch()
    prepare = make_preparation(Plan.of(config))
    more = padded(batch, 11 - tiny.ROWS, 0)
    full, longer = jax.jit(lambda *batches: [prepare(item, {})[0] for item in batches])(batch, more)
    chex.assert_trees_all_close(longer.advantages[: tiny.ROWS], full.advantages, rtol=1e-6, atol=1e-6)
    assert not longer.advantages[tiny.ROWS :].any()
