"""The race of grouped products, and the plans of the compilers of TPUs and GPUs for them."""

import json
import pathlib

import pytest

from benchmarks import grouped
from benchmarks.suites.aot import compiler
from benchmarks.suites.aot import grouped as plans

MIB = 2**20
# Programs, their operations over those of one product of all rows, and the most temporary memory.
PLANNED = [
    ("v5p", "forward", 1, 16),
    ("v5p", "gradient", 2, 16),
    ("h100", "forward", 1, 16),
    ("h100", "gradient", 2, 32),
]


def test_products_race_and_are_reported(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grouped.json"
    assert grouped.main(["--quick", "--all", "--rounds", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {title}, with gradients |" in printed for title in grouped.TITLES.values())
    assert "7 rows an expert: forward, over equal groups" in printed
    assert "512 rows an expert: with gradients, over dense" in printed
    assert "7 rows an expert: forward, over dense" not in printed
    fields = json.loads(file.read_text())
    assert grouped.report(fields).text == printed


@pytest.mark.slow
@pytest.mark.parametrize(("device", "kind", "products", "mib"), PLANNED)
def test_compiled_product_computes_no_other_group(device, kind, products, mib):
    """A dense one would have 128 times the operations, and a copy of the rows for each of its matrices."""
    reason = compiler.missing(compiler.DEFAULT, "cuda" if device == "h100" else "tpu")
    if reason is not None:
        pytest.skip(reason)
    plan = plans.compile_in(compiler.DEFAULT, device, kind)
    assert plan.kernels == (device == "v5p"), plan
    assert products <= plan.flops <= 1.01 * products, plan
    assert plan.temp_bytes <= mib * MIB, plan
