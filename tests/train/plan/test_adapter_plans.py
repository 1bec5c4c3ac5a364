"""Plans of the compiler of GPUs for updates of an adapter: fewer bytes than all weights, and no exchange of pieces.

Each is compiled in a process of an environment of its own, which `make test-aot` makes.
"""

import functools
import json
import pathlib
import subprocess
import tempfile
from typing import Any

import pytest

from benchmarks.harness import environments
from benchmarks.suites import compiler

ROOT = pathlib.Path(__file__).parents[3]
LORA = "lora={rank: 32, alpha: 64, targets: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}"
pytestmark = pytest.mark.slow


@functools.cache
def planned(topology: str, *overrides: str) -> dict[str, Any]:
    reason = compiler.missing(compiler.DEFAULT, "cuda")
    if reason is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "plan.json"
        command = [environments.interpreter(compiler.DEFAULT), "-m", "tests.train.plan.plan_update", file, topology]
        command += overrides
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(file.read_text())


def test_adapter_update_moves_fewer_bytes_than_all_weights():
    """With JAX 0.10.2: 1,633 GB of 1,653."""
    adapter = planned("h100:1", LORA, "model.param_dtype=bfloat16")["bytes"]
    assert adapter <= min(1.75e12, planned("h100:1")["bytes"])


def test_weights_are_gathered_before_they_are_joined():
    kinds = planned("h100:8", LORA, "model.param_dtype=bfloat16", "mesh.fsdp=8")["collectives"]
    assert "all-gather" in kinds
    assert "all-to-all" not in kinds
