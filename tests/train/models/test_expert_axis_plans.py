"""Plans of the compilers of TPUs and GPUs for experts over devices: little memory, and the rows of tokens alone.

Each layer is compiled in a process of an environment of its own, which `make test-aot` makes.
"""

import pytest

from benchmarks.suites import compiler
from tests.train.models.plan_expert_axis import SHAPE, TOKENS, compile_in
from train.models.dispatch import ChunkSizes

GIB = 2**30
ROW_BYTES = 2 * SHAPE.width


@pytest.mark.slow
@pytest.mark.parametrize(("device", "ways"), [("v5p", 8), ("h100", 8), ("v5p", 16), ("h100", 16)])
def test_experts_of_devices_take_little_memory(device, ways):
    """Without chunks it would be 5.8 GiB; every expert for every row would be 16 times the operations."""
    reason = compiler.missing(compiler.DEFAULT, "cuda" if device == "h100" else "tpu")
    if reason is not None:
        pytest.skip(reason)
    plan = compile_in(compiler.DEFAULT, device, ways)
    assert plan.temp_bytes < GIB, plan
    # Forward, again in the backward pass, and two gradients.
    assert 4 <= plan.flops <= 4.05, plan
    assert plan.kernels, plan
    sizes, sums = ChunkSizes.of(TOKENS, 8, ways=ways, row_bytes=ROW_BYTES), {"all-reduce", "reduce-scatter"}
    summed = sum(size for kind, size in plan.collectives.items() if kind in sums)
    if ways == 8:
        # Tokens twice and their cotangents; routes and gates are small. Results and gradients return, in float32.
        gathered = ways * TOKENS * ROW_BYTES
        assert {"all-gather"} < set(plan.collectives) <= {"all-gather", *sums}, plan
        assert 3 * gathered <= plan.collectives["all-gather"] <= 3.1 * gathered, plan
        assert summed <= 4.1 * gathered, plan
    else:
        sent = ways * sizes.chunks * sizes.sent * ROW_BYTES
        assert 7 * sent <= plan.collectives["all-to-all"] <= 7.2 * sent <= 3.7 * ways * TOKENS * ROW_BYTES, plan
        assert summed <= 0.1 * 7 * ways * TOKENS * ROW_BYTES, plan
