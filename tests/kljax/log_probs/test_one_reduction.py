"""The statistics of a tile of logits in one reduction, as Hopper GPUs compute them, forced on a CPU."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import kljax
from kljax import Head, HeadSharding, Tile
from kljax.log_probs._head import ALL_COLUMNS, DEFAULTS, HeadDefaults, head_defaults

WHOLE = Tile(4, ALL_COLUMNS)
SPLIT = HeadSharding(tokens=P(("data", "fsdp")), head=P("fsdp", "tensor"))


def statistics(tile: Tile, sharding: HeadSharding | None, options: dict[str, Any]) -> Any:
    """All statistics of 8 tokens, one of them masked and NaN, with the gradients of two losses of them."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = (3 * jax.random.normal(keys[0], (8, 6))).at[3].set(jnp.nan)
    weights, targets = 2 * jax.random.normal(keys[1], (6, 24)), jax.random.randint(keys[2], (8,), 0, 24)
    given: dict[str, Any] = {"mask": jnp.arange(8) != 3, "entropy": True, "sum_squared_probs": True}

    def token_loss(stats: kljax.TokenStats, scale: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss = scale * stats.log_prob + stats.entropy - 2 * stats.sum_squared_probs
        return loss, {"entropy": stats.entropy}

    def losses(hidden: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        head = Head(weights, sharding=sharding, tile=tile, **options)
        stats = kljax.log_probs_from_hidden(hidden, head, targets, **given)
        fused = kljax.token_loss_from_hidden(hidden, head, targets, token_loss, jnp.arange(8.0), token_chunk=3, **given)
        return (stats.log_prob + stats.entropy + stats.sum_squared_probs).sum() + fused[0], (stats, fused)

    return jax.jit(jax.value_and_grad(losses, argnums=(0, 1), has_aux=True))(hidden, weights)


@pytest.mark.parametrize("options", [{}, {"vocab_size": 21, "softcap": 5.0}], ids=["plain", "padded"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tile", [Tile(3, 5), WHOLE], ids=["tiles", "whole"])
def test_one_reduction_equals_a_maximum_and_sums(
    tile: Tile, split: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = jax.make_mesh((2, 2, 2) if split else (1, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        expected = statistics(tile, SPLIT if split else None, options)
        monkeypatch.setitem(DEFAULTS, "cpu", HeadDefaults(tile, 4, one_reduction=True))
        actual = statistics(tile, SPLIT if split else None, options)
    chex.assert_trees_all_close(actual, expected, rtol=2e-6, atol=2e-6)


def test_one_reduction_is_used_where_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def reductions() -> tuple[bool, bool]:
        hidden, targets = jnp.ones((4, 7), jnp.float32), jnp.zeros(4, jnp.int32)
        program = str(
            jax.make_jaxpr(lambda h, w: kljax.log_probs_from_hidden(h, Head(w), targets, entropy=True))(
                hidden, jnp.ones((7, 6), jnp.float32)
            )
        )
        return "reduce_max" in program, "reduce[" in program

    assert reductions() == (True, False)
    monkeypatch.setitem(DEFAULTS, "cpu", HeadDefaults(WHOLE, 4, one_reduction=True))
    assert reductions() == (False, True)


def test_hopper_takes_whole_rows_in_one_reduction() -> None:
    row = head_defaults("NVIDIA H100 80GB HBM3")
    assert row.one_reduction
    assert row.tile == Tile(row.token_chunk, ALL_COLUMNS)
    assert [name for name, row in DEFAULTS.items() if row.one_reduction] == ["NVIDIA H"]


def test_one_reduction_does_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULTS, "cpu", HeadDefaults(WHOLE, 4, one_reduction=True))
    logits = jnp.array([[-3e4, 3e4, 3e4, 0.0], [0.0, -1e30, 0.0, -3e38]], jnp.float32)
    stats = kljax.log_probs_from_hidden(logits, jnp.eye(4), jnp.array([1, 0]), entropy=True)
    chex.assert_trees_all_close((stats.log_prob, stats.entropy), (jnp.full(2, -math.log(2)), jnp.full(2, math.log(2))))
