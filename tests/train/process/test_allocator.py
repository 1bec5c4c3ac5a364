"""Freed memory stays with a process that computes on CPUs."""

import os
import subprocess
import sys

import pytest

from train.process.allocator import keep_freed_memory

LOOP = """
import resource, sys
import numpy as np
from train.process.allocator import keep_freed_memory

kept = sys.argv[1] == "keep" and keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    arrays = [np.ones(100_000, np.uint8) for _ in range(40)]
    del arrays
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def loop(switch: str, **environment: str) -> tuple[bool, int]:
    """Whether memory is kept, and the pages that the system gave in 50 rounds of 4 MB."""
    command = [sys.executable, "-c", LOOP, switch]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    kept, pages = map(int, done.stdout.split())
    return bool(kept), pages


def test_freed_memory_is_used_again() -> None:
    kept, pages = loop("keep", JAX_PLATFORMS="cpu")
    if not kept:
        pytest.skip("the C library of this machine has no mallopt")
    _, otherwise = loop("default", JAX_PLATFORMS="cpu")
    assert pages * 5 < otherwise


def test_memory_beside_an_accelerator_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.process.allocator.used_accelerator", lambda environment: "tpu")
    assert not keep_freed_memory()
