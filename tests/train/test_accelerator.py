"""Tests that need a GPU or TPU: the attention kernel that it gets, and a run of the trainer."""

import json
import math

import pytest

from benchmarks.suites.accelerator.attention import TINY, AttentionContender, Shape
from train.__main__ import main

# cuDNN and splash attention take heads of 64; 192 tokens are no multiple of splash attention's lanes.
SHAPES = {"full": Shape(2, 192, 4, 2, 64), "window": Shape(2, 256, 4, 2, 64, 100), **TINY}


@pytest.mark.accelerator
@pytest.mark.thorough
@pytest.mark.parametrize("name", SHAPES)
def test_device_attention_equals_xla(name):
    (row,) = AttentionContender(SHAPES).rows(name, seconds=60)
    assert row["xla_ms"] > 0
    assert "problem" not in row, row["problem"]


@pytest.mark.accelerator
@pytest.mark.thorough
def test_the_trainer_runs(tmp_path):
    assert main(["configs/smoke.yaml", f"output={tmp_path}"]) == 0
    (file,) = tmp_path.glob("*/summary.json")
    summary = json.loads(file.read_text())
    assert all(math.isfinite(value) for value in summary.values())
    assert summary["kl_reference"] > 0
