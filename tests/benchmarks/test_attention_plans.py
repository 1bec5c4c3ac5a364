"""Plans of attention over long rows: no array of all pairs, few temporaries, and windows that leave blocks out.

The command runs in an environment of its own, which `make test-aot` makes.
"""

import functools
import subprocess

import pytest

from benchmarks.harness import environments
from benchmarks.harness.process import ROOT
from benchmarks.suites import compiler

pytestmark = pytest.mark.slow
# MiB of a row of 32,768 slots.
TEMPORARIES = {"H100": 200, "v5p": 430}


@functools.cache
def table() -> dict[tuple[str, str], tuple[str, int, str]]:
    """What computes a row on a device, its MiB, and its pairs."""
    reason = compiler.missing(compiler.DEFAULT, "cuda") or compiler.missing(compiler.DEFAULT, "tpu")
    if reason is not None:
        pytest.skip(reason)
    command = [environments.interpreter(compiler.DEFAULT), "-m", "benchmarks.attention_aot"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    return {(row, device): (by, int(mib), pairs) for row, device, by, mib, pairs in rows}


@pytest.mark.parametrize("device", ["H100", "v5p"])
def test_temporaries_are_few_and_no_array_has_all_pairs(device):
    for (row, where), (_, mib, pairs) in table().items():
        if where == device:
            assert float(pairs) <= 1.03, row
            assert mib <= TEMPORARIES[device], row


def test_windows_and_other_sequences_are_left_out():
    assert table()["1 x 16,384, window of 1,024", "H100"][0] == "`cudnn`"
    assert table()["4 x 8,192", "H100"][0] == "`triton`"
    for device, window in (("H100", 0.13), ("v5p", 0.19)):
        assert float(table()["4 x 8,192", device][2]) <= 0.27
        assert float(table()["1 x 16,384, window of 1,024", device][2]) <= window
        assert float(table()["4 x 4,096, window of 1,024", device][2]) <= window
