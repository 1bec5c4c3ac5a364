"""Plans of the compilers of TPUs and GPUs for experts over eight devices: little memory, and the rows of tokens alone.

Each layer is compiled in a process of an environment of its own, which `make test-aot` makes.
"""

import pytest

from benchmarks.suites import compiler
from tests.train.models.plan_expert_axis import SHAPE, TOKENS, WAYS, compile_in

GIB = 2**30
GATHERED = WAYS * TOKENS * SHAPE.width * 2
"""Bytes of the tokens of all devices."""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["v5p", "h100"])
def test_experts_of_devices_take_little_memory(device):
    """Without chunks it would be 5.8 GiB; every expert for every row would be 16 times the operations."""
    reason = compiler.missing(compiler.DEFAULT, "cuda" if device == "h100" else "tpu")
    if reason is not None:
        pytest.skip(reason)
    plan = compile_in(compiler.DEFAULT, device)
    assert plan.temp_bytes < GIB, plan
    # Forward, again in the backward pass, and two gradients.
    assert 4 <= plan.flops <= 4.05, plan
    assert plan.kernels == (device == "v5p"), plan
    # Tokens twice and their cotangents; routes and gates are small. Results and gradients return.
    sums = {"all-reduce", "reduce-scatter"}
    assert {"all-gather"} < set(plan.collectives) <= {"all-gather", *sums}, plan
    assert 3 * GATHERED <= plan.collectives["all-gather"] <= 3.1 * GATHERED, plan
    assert sum(size for kind, size in plan.collectives.items() if kind in sums) <= 4.1 * GATHERED, plan
