"""The loss and its gradient do not change when a batch is split, padded, permuted or sharded.

The loss is a PPO term, a reference KL term and a rollout KL term, all reduced with the token weights of the whole
batch, which are computed before the split. Everything is compared with the whole batch at 1e-12.
"""

import functools
import operator
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kljax
from kljax.aggregation import MODES
from tests import oracles

ROWS, LENGTH, PROMPTS = 8, 6, 3
CLOSE = {"rtol": 1e-12, "atol": 1e-13}
PER_TOKEN = ("log_probs", "old", "ref", "rollout", "advantages")

Batch = dict[str, np.ndarray]


def arguments(mode: str) -> dict[str, object]:
    return {"mode": mode, **({"max_length": 10.0} if mode == "seq_mean_token_sum_norm" else {})}


def weights_of(batch: Batch, mode: str, empty_rows: str) -> jax.Array:
    prompts = {"group_ids": batch["group_ids"], "num_groups": PROMPTS} if mode == "prompt_mean" else {}
    return kljax.token_weights(batch["mask"], empty_rows=empty_rows, **arguments(mode), **prompts)


def draw_batch(seed: int, mask: np.ndarray) -> Batch:
    rng = np.random.default_rng(seed)
    batch = {name: rng.normal(-1.0, 0.4, mask.shape) for name in PER_TOKEN}
    batch["advantages"] = rng.normal(size=mask.shape)
    return {**batch, "mask": mask, "group_ids": rng.integers(0, PROMPTS, len(mask))}


def loss(log_probs: jax.Array, batch: dict[str, jax.Array], weights: jax.Array) -> jax.Array:
    mask = batch["mask"]
    policy = kljax.ppo_clip_loss(log_probs, batch["old"], batch["advantages"], mask, dual_clip=3.0)
    reference = kljax.reference_kl_loss(log_probs, batch["ref"], mask, estimator="k3", gradient="k2")
    rollout = kljax.rollout_kl_loss(log_probs, batch["rollout"], mask, estimator="k2")
    return ((policy + 0.1 * reference + 0.05 * rollout) * weights).sum()


# Compiled once for every shape of a part, not once for every draw.
value_and_grad = jax.jit(jax.value_and_grad(loss))


def in_parts(batch: Batch, weights: np.ndarray, parts: Sequence[Sequence[int]]) -> tuple[float, np.ndarray]:
    """Adds loss and gradient over micro-batches of the given rows."""
    total, grad = 0.0, np.zeros_like(batch["log_probs"])
    for rows in parts:
        part = {name: value[list(rows)] for name, value in batch.items()}
        value, part_grad = value_and_grad(part["log_probs"], part, weights[list(rows)])
        total, grad[list(rows)] = total + float(value), part_grad
    return total, grad


def padded(batch: Batch, rows: int, columns: int) -> Batch:
    """The batch with masked rows and columns of NaN added, in every field."""

    def pad(value: np.ndarray, fill: float) -> np.ndarray:
        widths = [(0, rows), (0, columns)][: value.ndim]
        return np.pad(value, widths, constant_values=fill)

    out = {name: pad(batch[name], np.nan) for name in PER_TOKEN}
    return {**out, "mask": pad(batch["mask"], False), "group_ids": pad(batch["group_ids"], 0)}


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]), ("data",))


def sharded(value: np.ndarray) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh(), PartitionSpec("data")))


def check_invariance(batch: Batch, mode: str, empty_rows: str, order: Sequence[int]) -> None:
    weights = np.asarray(weights_of(batch, mode, empty_rows))
    full = value_and_grad(batch["log_probs"], batch, weights)
    everything = range(ROWS)
    splits: dict[str, list[list[int]]] = {
        "8x1": [[row] for row in everything],
        "3+5": [list(everything[:3]), list(everything[3:])],
        "permuted micro-batches": [list(order[:4]), list(order[4:])],
    }
    for name, parts in splits.items():
        chex.assert_trees_all_close(in_parts(batch, weights, parts), full, **CLOSE, custom_message=name)
    shuffled = {name: value[list(order)] for name, value in batch.items()}
    value, grad = value_and_grad(shuffled["log_probs"], shuffled, weights_of(shuffled, mode, empty_rows))
    chex.assert_trees_all_close((value, grad[np.argsort(order)]), full, **CLOSE, custom_message="permuted")
    columns = padded(batch, 0, 3)
    value, grad = value_and_grad(columns["log_probs"], columns, weights_of(columns, mode, empty_rows))
    chex.assert_trees_all_close((value, grad[:, :LENGTH]), full, **CLOSE, custom_message="padded columns")
    chex.assert_trees_all_equal(grad[:, LENGTH:], jnp.zeros((ROWS, 3)))
    on_devices = {name: sharded(value) for name, value in batch.items()}
    spread = value_and_grad(on_devices["log_probs"], on_devices, weights_of(on_devices, mode, empty_rows))
    assert len(spread[1].sharding.device_set) == 8
    chex.assert_trees_all_close(jax.device_get(spread), jax.device_get(full), **CLOSE, custom_message="8 devices")


@pytest.mark.parametrize("empty_rows", ["drop", "count"])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), mask=oracles.masks(ROWS, LENGTH), order=st.permutations(range(ROWS)))
def test_split_permuted_padded_in_columns_and_sharded(
    mode: str, empty_rows: str, seed: int, mask: np.ndarray, order: list[int]
) -> None:
    check_invariance(draw_batch(seed, mask), mode, empty_rows, order)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), mask=oracles.masks(ROWS, LENGTH))
def test_added_rows_change_nothing_without_empty_rows(mode: str, seed: int, mask: np.ndarray) -> None:
    batch = draw_batch(seed, mask)
    full = value_and_grad(batch["log_probs"], batch, weights_of(batch, mode, "drop"))
    more = padded(batch, 5, 2)
    value, grad = value_and_grad(more["log_probs"], more, weights_of(more, mode, "drop"))
    chex.assert_trees_all_close((value, grad[:ROWS, :LENGTH]), full, **CLOSE)
    assert not grad[ROWS:].any()


@pytest.mark.parametrize("mode", MODES)
def test_added_rows_dilute_a_mean_counting_empty_rows(mode: str) -> None:
    # "count" means what it says: 8 rows added to 8 halve a mean over rows. A mean over tokens has no rows to count, and
    # a prompt counts if a row names it, so rows of padding that name a present prompt leave "prompt_mean" alone.
    batch = draw_batch(0, np.ones((ROWS, LENGTH), bool))
    batch["group_ids"] = np.arange(ROWS) % PROMPTS
    full, _ = value_and_grad(batch["log_probs"], batch, weights_of(batch, mode, "count"))
    more = padded(batch, ROWS, 0)
    diluted, _ = value_and_grad(more["log_probs"], more, weights_of(more, mode, "count"))
    ratio = 0.5 if mode.startswith("seq_mean") else 1.0
    chex.assert_trees_all_close(diluted, ratio * full, **CLOSE)


@jax.jit
def metrics(batch: dict[str, jax.Array]) -> list[kljax.WeightedSum]:
    log_probs, mask = batch["log_probs"], batch["mask"]
    return [
        kljax.reference_kl(log_probs, batch["ref"], mask),
        kljax.rollout_kl(log_probs, batch["rollout"], mask),
        kljax.ppo_kl(log_probs, batch["old"], mask),
        kljax.clip_fraction(log_probs, batch["old"], batch["advantages"], mask),
    ]


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), mask=oracles.masks(ROWS, LENGTH), cut=st.sampled_from([1, 3]))
def test_metrics_add_over_any_split(seed: int, mask: np.ndarray, cut: int) -> None:
    batch = draw_batch(seed, mask)
    halves = [{name: value[rows] for name, value in batch.items()} for rows in (slice(None, cut), slice(cut, None))]
    for full, first, second in zip(*map(metrics, (batch, *halves)), strict=True):
        chex.assert_trees_all_close((first + second).value(), full.value(), **CLOSE)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**16),
    mask=oracles.masks(ROWS, LENGTH),
    parts=st.sampled_from([[8], [1] * 8, [3, 5], [2, 2, 4]]),
    estimator=st.sampled_from(["k1", "k2", "k3", "abs"]),
)
def test_centred_adjustment_sums_to_zero_whatever_the_split(
    seed: int, mask: np.ndarray, parts: list[int], estimator: str
) -> None:
    batch = draw_batch(seed, mask)
    names = ("advantages", "log_probs", "ref", "mask")
    full, mean = kljax.centered_kl_advantages(*(batch[n] for n in names), coef=0.3, estimator=estimator)
    pieces = list(zip(*(np.split(batch[name], np.cumsum(parts)[:-1]) for name in names), strict=True))
    total = functools.reduce(
        operator.add,
        (
            kljax.WeightedSum.of(kljax.estimate_kl(lp, ref, part_mask, estimator=estimator), part_mask)
            for _, lp, ref, part_mask in pieces
        ),
    )
    adjusted = [
        kljax.centered_kl_advantages(*piece, coef=0.3, estimator=estimator, mean_kl=total)[0] for piece in pieces
    ]
    joined = jnp.concatenate(adjusted)
    chex.assert_trees_all_close(joined, full, **CLOSE)
    shift = joined - np.where(mask, batch["advantages"], 0)
    chex.assert_trees_all_close(shift.sum(), jnp.zeros(()), rtol=0, atol=1e-12)
    chex.assert_trees_all_close(mean, total.value(), **CLOSE)


def test_centred_adjustment_over_a_mapped_axis() -> None:
    batch = draw_batch(3, np.tile(oracles.MASK_KINDS[[1, 3]], (4, 1)))
    names = ("advantages", "log_probs", "ref", "mask")
    full = kljax.centered_kl_advantages(*(batch[n] for n in names), coef=0.3)
    spec = PartitionSpec("data")
    mapped = jax.shard_map(
        functools.partial(kljax.centered_kl_advantages, coef=0.3, axis_name="data"),
        mesh=mesh(),
        in_specs=(spec,) * 4,
        out_specs=(spec, PartitionSpec()),
    )
    parts = jax.jit(mapped)(*(sharded(batch[n]) for n in names))
    chex.assert_trees_all_close(jax.device_get(parts), jax.device_get(full), **CLOSE)
