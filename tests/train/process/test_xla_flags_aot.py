"""The compilers of TPUs and GPUs know the flags that they get; they run in an environment of their own."""

import os
import subprocess

import pytest

from benchmarks.harness import environments
from benchmarks.suites import compiler
from train.process.xla_flags import FLAGS, PLATFORM_EXTRAS, XLA, add_flags

PROGRAM = """
import sys
from train.plan.compiler.topology import load_compilers, parse_topology, topology_devices
load_compilers()
import jax
device = topology_devices(parse_topology(sys.argv[1]))[0]
x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
jax.jit(jax.numpy.sum).lower(x).compile()
print("compiled")
"""


def compiles(topology, environment):
    command = [str(environments.interpreter(compiler.DEFAULT)), "-c", PROGRAM, topology]
    return "compiled" in subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "topology"), [("cuda", "h100:1"), ("tpu", "v5e:2x2")])
def test_compilers_know_their_flags(platform, topology):
    reason = compiler.missing(compiler.DEFAULT, platform)
    if reason is not None:
        pytest.skip(reason)
    environment = {**os.environ, XLA: ""}
    extra = PLATFORM_EXTRAS[platform]
    add_flags(environment, extra)
    assert compiles(topology, environment)
    # The reason for the test: another flag ends the process.
    variable = FLAGS[extra].variable
    environment[variable] = f"{environment.get(variable, '')} --xla_flag_of_nobody=true"
    assert not compiles(topology, environment)
