"""Tests that need a GPU or TPU: attention, the grouped product, and a run of the trainer."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness.measure import relative_distance
from benchmarks.suites.accelerator.attention import TINY, AttentionContender, Shape
from tests.train.models.test_grouped import by_each_group
from train.__main__ import main
from train.models.grouped import grouped_dot

# All kernels take heads of 64; 192 and 200 slots are no multiple of the lanes of a TPU.
SHAPES = {
    "full": Shape(2, ((1, 192),), 4, 2, 64),
    "window": Shape(2, ((1, 256),), 4, 2, 64, 100),
    "packed": Shape(2, ((4, 48),), 4, 2, 64),
    "group": Shape(2, ((1, 80), (3, 40)), 4, 2, 64, 50),
    "tree": Shape(2, ((1, 100), (2, 60), (3, 20)), 4, 2, 64, 90),
    **TINY,
}


@pytest.mark.accelerator
@pytest.mark.thorough
@pytest.mark.parametrize("name", SHAPES)
def test_device_attention_equals_attention_in_blocks(name):
    rows = AttentionContender(SHAPES).rows(name, seconds=60)
    assert [row["name"] for row in rows if row["chosen"]]
    for row in rows:
        assert "problem" not in row, row["problem"]
        assert row["ms"] > 0


@pytest.mark.accelerator
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [8, 40, 1000])
@pytest.mark.parametrize("sizes", [(256, 384), (64, 8), (8, 192), (2880, 64)], ids=str)
def test_device_grouped_product_equals_each_group_apart(sizes, rows, dtype):
    """Value and gradients where groups are empty, rows of no group hold NaN, and sizes are no multiples of a block."""
    inputs, outputs = sizes
    groups = np.array([rows // 2, 0, 3, 0, rows // 4, 1])
    keys = jax.random.split(jax.random.key(0), 3)
    x, g = (jax.random.normal(key, (rows, size), dtype) for key, size in zip(keys[:2], sizes, strict=True))
    weights = jax.random.normal(keys[2], (len(groups), inputs, outputs), dtype)
    is_real = (jnp.arange(rows) < groups.sum())[:, None]
    x, g = (jnp.where(is_real, array, jnp.nan) for array in (x, g))
    with jax.default_matmul_precision("highest"):
        y, pull = jax.vjp(lambda x, w: grouped_dot(x, w, jnp.array(groups)), x, weights)
        results = (y, *pull(g))
    for result, exact in zip(results, by_each_group(x, weights, groups, g), strict=True):
        assert relative_distance(np.asarray(result, np.float64), exact) <= (2**-8 if dtype == "bfloat16" else 1e-6)


@pytest.mark.accelerator
@pytest.mark.thorough
def test_the_trainer_runs(tmp_path):
    assert main(["configs/smoke.yaml", f"output={tmp_path}"]) == 0
    (file,) = tmp_path.glob("*/summary.json")
    summary = json.loads(file.read_text())
    assert all(value is None or math.isfinite(value) for value in summary.values())
    assert summary["kl_reference"] > 0
