"""Plans of the compilers of TPUs and GPUs for the grouped product: the flops of its rows alone, and little memory.

Each product is compiled in a process of an environment of its own, which `make test-aot` makes.
"""

import pytest

from benchmarks.suites import compiler
from tests.train.models.plan_grouped import compile_in

MIB = 2**20
# Programs, the type of their rows, their operations over those of one product of all rows, and the most temporary
# memory. GPUs have no kernel for float32.
PLANNED = [
    ("v5p", "forward", "bfloat16", 1, 16),
    ("v5p", "gradient", "bfloat16", 2, 16),
    ("h100", "forward", "bfloat16", 1, 1),
    ("h100", "gradient", "bfloat16", 2, 225),
    ("h100", "forward", "float32", 1, 21),
    ("h100", "gradient", "float32", 2, 32),
]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "kind", "dtype", "products", "mib"), PLANNED)
def test_compiled_product_computes_no_other_group(device, kind, dtype, products, mib):
    """A dense one would have 128 times the operations, and a copy of the rows for each of its matrices."""
    reason = compiler.missing(compiler.DEFAULT, "cuda" if device == "h100" else "tpu")
    if reason is not None:
        pytest.skip(reason)
    plan = compile_in(compiler.DEFAULT, device, kind, dtype)
    assert plan.kernels == (dtype == "bfloat16"), plan
    assert products <= round(plan.flops, 9) <= 1.01 * products, plan
    assert plan.temp_bytes <= mib * MIB, plan
