"""Plans of the compiler of TPUs for the engine of turns: no program copies the KV cache.

They are compiled in a process of an environment of its own, which `make test-aot` makes.
"""

import json
import subprocess

import pytest

from benchmarks.harness import environments
from benchmarks.harness.process import ROOT
from benchmarks.suites import compiler

MISSING = compiler.missing(compiler.DEFAULT, "tpu")


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_no_program_of_a_tpu_copies_the_pool():
    python = environments.interpreter(compiler.DEFAULT)
    command = [str(python), "-m", "tests.train.rollouts.plan_engine", "v5e:1x1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    copies = json.loads(done.stdout.splitlines()[-1])
    assert {name.split("_")[0] for name in copies} == {"extend", "decode", "put", "copy"}
    assert not any(copies.values()), copies
