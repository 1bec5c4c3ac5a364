"""Every field of a batch goes through padding, slicing, joining and splitting, whatever its name and whenever added."""

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
from train.rl.objective import coefficients, make_objective, make_preparation, token_weights
from train.sequences.batch import (
    PER_ROW,
    Batch,
    concatenate,
    map_micro_batches,
    merge_micro_batches,
    micro_batches,
    pad_columns,
    pad_rows,
    present_arrays,
    required,
    row_count,
    take_rows,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extended(Batch):
    """A batch of some later version: new fields that no function of `train.sequences.batch` has heard of."""

    images: jax.Array | None = None  # [B, T, 2], per token
    entropies: jax.Array | None = None  # [B, T]
    difficulty: jax.Array | None = dataclasses.field(default=None, metadata=PER_ROW)
    votes: jax.Array | None = dataclasses.field(default=None, metadata=PER_ROW)  # [B, 2]


ROWS, LENGTH = 6, 5
ATTRIBUTES = {field.name: field for field in dataclasses.fields(Extended) if field.name != "fields"}
FIELDS = ATTRIBUTES | {"kept_ids": None}
NEEDED = ("tokens", "token_mask", "completion_mask")
OPTIONAL = sorted(FIELDS.keys() - set(NEEDED))
# As few shapes and dtypes as there may be: each pair of them is compiled for every function.
DTYPES = {"token_mask": bool, "completion_mask": bool, "images": np.uint8, "votes": np.int16}
TRAILING = {"images": (2,), "kept_ids": (2,), "ref_hidden": (2,), "votes": (2,)}


def per_row(name: str) -> bool:
    return name in ATTRIBUTES and ATTRIBUTES[name].metadata.get("axes") == "row"


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
    assert [name for name in FIELDS if per_row(name)] == [
        "prompt_lengths",
        "rewards",
        "group_ids",
        "episode_rows",
        "row_numbers",
        "difficulty",
        "votes",
    ]


@functools.cache
def padded_and_split() -> tuple[Extended, Extended, Extended, Extended]:
    """A batch with every field; padded, split, and merged again."""

    @jax.jit
    def run(batch: Extended) -> tuple[Extended, Extended, Extended]:
        padded = pad_columns(pad_rows(batch, 9), 8)
        split = micro_batches(padded, 3)
        return padded, split, merge_micro_batches(split)

    batch = batch_of(OPTIONAL)
    return batch, *run(batch)


@pytest.mark.parametrize("name", OPTIONAL)
def test_every_optional_field_survives_padding_and_micro_batching(name):
    before, after, split, merged = (each(batch)[name] for batch in padded_and_split())
    assert after.shape[: 1 if per_row(name) else 2] == ((9,) if per_row(name) else (9, 8))
    selected = after[:ROWS] if per_row(name) else after[:ROWS, :LENGTH]
    np.testing.assert_array_equal(selected, before)
    padding = -1 if name in ("group_ids", "episode_rows", "kept_ids", "row_numbers") else 0
    assert (after[ROWS:] == padding).all()
    assert per_row(name) or (after[:, LENGTH:] == padding).all()
    assert split.shape == (3, 3, *after.shape[1:])
    for part in range(3):
        np.testing.assert_array_equal(split[part], after[part::3])
    np.testing.assert_array_equal(merged, after)
    assert after.dtype == split.dtype == before.dtype


@hypothesis.given(names=some_fields, sizes=st.sampled_from([(0, 0), (3, 1)]))
def test_padding_preserves_present_fields_and_adds_none(names, sizes):
    rows, columns = sizes
    batch = batch_of(names)
    padded = pad_rows(pad_columns(batch, LENGTH + columns), ROWS + rows)
    assert type(padded) is Extended
    assert each(padded).keys() == each(batch).keys()
    assert row_count(padded) == ROWS + rows
    assert not padded.token_mask[ROWS:].any()
    assert not padded.completion_mask[:, LENGTH:].any()
    cut = take_rows(padded, slice(0, ROWS))
    for name, value in each(batch).items():
        now = each(cut)[name]
        np.testing.assert_array_equal(now if per_row(name) else now[:, :LENGTH], value, err_msg=name)
        assert now.dtype == value.dtype


@hypothesis.given(names=some_fields, rows=some_rows)
def test_rows_are_taken_in_the_requested_order(names, rows):
    batch = batch_of(names)
    taken = take_rows(batch, jnp.asarray(rows))
    chex.assert_trees_all_equal(each(taken), {name: value[rows] for name, value in each(batch).items()})
    chex.assert_trees_all_equal_dtypes(taken, batch)


@hypothesis.given(names=some_fields)
def test_joined_parts_equal_the_batch(names):
    batch = batch_of(names)
    parts = [take_rows(batch, slice(0, 1)), take_rows(batch, slice(1, None))]
    chex.assert_trees_all_equal(concatenate(parts), batch)
    chex.assert_trees_all_equal_dtypes(concatenate(parts), batch)


@hypothesis.given(names=some_fields)
def test_joining_different_lengths_pads_on_the_right(names):
    short, long = batch_of(names, rows=2, length=3, seed=1), batch_of(names, rows=4, length=7, seed=2)
    joined = concatenate([short, long])
    chex.assert_trees_all_equal(take_rows(joined, slice(0, 2)), pad_columns(short, 7))
    chex.assert_trees_all_equal(take_rows(joined, slice(2, None)), long)


@pytest.mark.parametrize("name", OPTIONAL)
def test_field_missing_in_some_batches_is_named(name):
    others = [other for other in OPTIONAL if other != name]
    for pair in ((OPTIONAL, others), (others, OPTIONAL)):
        with pytest.raises(ValueError, match=rf"^{name}: present in some of the batches and missing in others"):
            concatenate([batch_of(names) for names in pair])


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
    batch = concatenate([batch_of(["rewards"])] * 2)
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
    with pytest.raises(ValueError, match="rows: got 5, expected at least the 6"):
        pad_rows(batch, 5)
    with pytest.raises(ValueError, match="length: got 4, expected at least the 5"):
        pad_columns(batch, 4)
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
        weighted = dataclasses.replace(batch, token_weights=token_weights(Plan.of(CONFIG), CONFIG.loss, batch))
        return gradient({"params": params}, None, weighted, coefficients(CONFIG))

    full, padded = results(batch), results(pad_columns(pad_rows(batch, 12), tiny.LENGTH + 3))
    # Values of tokens are 0 in padding, which their sums would show.
    cropped = jax.tree.map(lambda x, like: x[tuple(map(slice, like.shape))], padded[0], full[0])
    chex.assert_trees_all_close(cropped, full[0], rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_equal(*(jax.tree.map(np.count_nonzero, values) for values in (cropped, padded[0])))
    assert float(full[0][0]) != 0
    # A rounding of these weights moves the gradient by 32 roundings: the count of operations knows no amplification.
    bound = rounding.of_weights(lambda moved: results(batch, moved)[1], params, longest_sum=24)
    rounding.assert_close_by_norm(padded[1], full[1], roundings=bound)
    with pytest.raises(AssertionError, match="roundings of the norm"):
        rounding.assert_close_by_norm(rounding.planted(padded[1], roundings=10 * bound), full[1], roundings=bound)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_added_rows_belong_to_no_prompt(estimator):
    config = tiny.config_of(f"advantage.type={estimator}", "advantage.whiten=true")
    batch = tiny.rollout_batch()
    prepare = make_preparation(Plan.of(config))
    full, padded = jax.jit(lambda *batches: [prepare(item, {})[0] for item in batches])(batch, pad_rows(batch, 11))
    chex.assert_trees_all_close(padded.advantages[: tiny.ROWS], full.advantages, rtol=1e-6, atol=1e-6)
    assert not padded.advantages[tiny.ROWS :].any()
