"""Plans of the compilers of accelerators for sampling on a mesh of its own: no decode step gathers a weight.

Each topology is compiled for in a process of an environment of its own, which `make test-aot` makes.
"""

import functools
import json
import subprocess
from typing import Any

import pytest

from benchmarks.harness import environments
from benchmarks.harness.process import ROOT
from benchmarks.suites import compiler

TOPOLOGIES = {"v5p:4x4x4": "tpu", "h200:8": "cuda"}


CASES = [
    pytest.param(name, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
    for name, reason in ((name, compiler.missing(compiler.DEFAULT, platform)) for name, platform in TOPOLOGIES.items())
]


@functools.cache
def plan(topology: str) -> dict[str, Any]:
    python = environments.interpreter(compiler.DEFAULT)
    command = [str(python), "-m", "tests.train.rollouts.plan_sampler", topology]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("topology", CASES)
def test_no_decode_step_moves_a_weight(topology):
    planned = plan(topology)
    assert planned["laid out"] == []
    # The control: weights in place are gathered.
    assert planned["in place"]


@pytest.mark.slow
@pytest.mark.parametrize("topology", CASES)
def test_layout_is_chosen_by_device_memory(topology):
    planned = plan(topology)
    expected = {
        "v5p:4x4x4": {"data": 16, "fsdp": 1, "expert": 1, "context": 1, "tensor": 4},
        "h200:8": {"data": 8, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1},
    }
    assert planned["mesh"] == expected[topology]
    assert "no decode step gathers weights, and both layouts fit" in planned["line"]


@pytest.mark.slow
@pytest.mark.parametrize("topology", CASES)
def test_moving_weights_take_at_most_three_leaves(topology):
    planned = plan(topology)
    assert planned["layout"]["temporary"] <= 3 * planned["largest"]
