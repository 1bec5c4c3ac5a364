"""Plans of compilers for the library's operation at full size: its memory and its collectives.

Each program is compiled in a process of an environment of its own, which `make test-aot` makes.
"""

import functools

import pytest

from benchmarks.harness.report import MIB
from benchmarks.head_aot import COLLECTIVES, FORWARD_MIB, LAYOUTS, MEMORY_MIB
from benchmarks.suites import compiler
from benchmarks.suites.compiler import CompiledPlan, Order

LIBTPU = "0.0.42"


def reason_to_skip() -> str | None:
    """No compiler, or one whose plans are others: `docs/benchmarks-aot.md` says what newer ones do."""
    missing = compiler.missing(compiler.DEFAULT, "tpu")
    if missing is not None:
        return missing
    actual = compiler.installed(compiler.DEFAULT)["libtpu"]
    same = actual == LIBTPU or actual.startswith(f"{LIBTPU}.")
    return None if same else f"the goals are those of libtpu {LIBTPU}, which JAX 0.10.2 pins; found {actual}"


REASON = reason_to_skip()
NO_CUDA = compiler.missing(compiler.DEFAULT, "cuda")
of_tpus = pytest.mark.skipif(REASON is not None, reason=str(REASON))
of_gpus = pytest.mark.skipif(NO_CUDA is not None, reason=str(NO_CUDA))

# Memory needs the compiler's full effort. Collectives do not depend on it, and without it take seconds.
FULL, LEAST = None, -1.0


@functools.cache
def plan(device: str, layout: str, program: str, effort: float | None) -> CompiledPlan:
    return compiler.compile_in(compiler.DEFAULT, Order(device, layout, program, effort=effort))


# Sharded, the chunks of all devices are made alike: one of them is enough where time is short.
CASES = [
    pytest.param(device, layout, marks=pytest.mark.thorough if layout == "sharded" and device != "v5e" else ())
    for device in MEMORY_MIB
    for layout in LAYOUTS
]


@of_tpus
@pytest.mark.slow
@pytest.mark.parametrize(("device", "layout"), CASES)
def test_memory(device, layout):
    planned = plan(device, layout, "kljax", FULL)
    assert planned.temp_bytes <= MEMORY_MIB[device] * MIB, planned.largest_buffers


@of_tpus
@pytest.mark.slow
@pytest.mark.parametrize("device", FORWARD_MIB)
def test_memory_of_a_forward_pass(device):
    planned = plan(device, "one", "kljax_forward", FULL)
    assert planned.temp_bytes <= FORWARD_MIB[device] * MIB, planned.largest_buffers


@of_tpus
@pytest.mark.slow
def test_collectives():
    # They differ between devices by the width of a chunk alone; the table of `benchmarks.head_aot` has them all.
    actual, expected = (plan("v5e", "sharded", program, LEAST) for program in ("kljax", "tunix"))
    assert 0 < actual.collective_bytes <= COLLECTIVES * expected.collective_bytes, actual.collectives


@of_tpus
@pytest.mark.slow
def test_head_columns_are_gathered_once_per_pass():
    order = Order("v5e", "sharded", "kljax")
    columns, width = order.problem.vocab // 4, order.problem.width
    planned = plan("v5e", "sharded", "kljax", LEAST).collectives
    gathered = sum(entry["payload"] * entry["executions"] for entry in planned if entry["kind"] == "all-gather")
    # In bfloat16, and two chunks may share some columns.
    assert 1 <= gathered / (2 * columns * width * 2) < 1.01


@of_gpus
@pytest.mark.slow
def test_a_forward_pass_on_hopper_keeps_no_logits():
    """A tile of them has 2,374 MiB."""
    planned = plan("h100", "one", "kljax_forward", FULL)
    assert planned.temp_bytes <= 200 * MIB, planned.largest_buffers
