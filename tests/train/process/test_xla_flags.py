"""Flags of the compilers of accelerators: who gets which, what the user sets wins, and jaxlib knows them."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

from train.config.accelerator import CPU
from train.process import xla_flags
from train.process.xla_flags import GPU_MEMORY_FRACTION, LIBTPU, MEMORY_FRACTION, XLA, add_flags, flags_line

RELEASE = metadata.version("jaxlib")
GPU_FLAG = "--xla_gpu_enable_latency_hiding_scheduler"


@pytest.fixture
def machine(monkeypatch):
    """Lets this machine have an accelerator and the plug-in for it."""

    def become(accelerator, *, installed=True):
        monkeypatch.setattr(xla_flags, "find_accelerator", lambda: accelerator)
        monkeypatch.setattr(xla_flags.util, "find_spec", lambda name: installed or None)

    return become


@pytest.mark.parametrize(
    ("accelerator", "platforms", "installed", "used"),
    [
        ("cuda12", "", True, "cuda12"),
        ("cuda13", "cuda,cpu", True, "cuda13"),
        ("cuda13", "gpu", True, "cuda13"),
        ("cuda12", "cpu", True, CPU),
        ("cuda12", "", False, CPU),
        ("tpu", "tpu", True, "tpu"),
        ("tpu", "cpu", True, CPU),
        (CPU, "", True, CPU),
    ],
)
def test_used_accelerator_is_the_one_that_jax_takes(machine, accelerator, platforms, installed, used):
    machine(accelerator, installed=installed)
    assert xla_flags.used_accelerator({"JAX_PLATFORMS": platforms} if platforms else {}) == used


def test_flags_go_before_those_of_the_user_which_stay():
    environment = {XLA: f"--mine=1 {GPU_FLAG}=false", MEMORY_FRACTION: "0.5"}
    add_flags(environment, "cuda13")
    assert environment == {XLA: f"--mine=1 {GPU_FLAG}=false", MEMORY_FRACTION: "0.5"}
    environment = {XLA: "--mine=1"}
    add_flags(environment, "cuda12")
    assert environment == {XLA: f"{GPU_FLAG}=true --mine=1", MEMORY_FRACTION: GPU_MEMORY_FRACTION}
    add_flags(environment, "cuda12")
    assert environment[XLA].count(GPU_FLAG) == 1
    # JAX refuses both names.
    environment = {"XLA_CLIENT_MEM_FRACTION": "0.6"}
    add_flags(environment, "cuda12")
    assert MEMORY_FRACTION not in environment
    add_flags(environment, "tpu")
    assert LIBTPU not in environment


@pytest.mark.parametrize(("accelerator", "release"), [(CPU, RELEASE), ("cuda12", "0.9.2"), ("tpu", "0.13.0.dev1")])
def test_cpus_and_unknown_releases_get_none(accelerator, release):
    environment = {}
    add_flags(environment, accelerator, release)
    assert environment == {}


def test_switch_and_line(machine, monkeypatch):
    monkeypatch.setattr(xla_flags.os, "environ", environment := {})
    machine(CPU)
    xla_flags.set_flags("auto")
    assert environment == {}
    assert flags_line("auto", environment) is None
    machine("cuda12")
    xla_flags.set_flags("none")
    assert flags_line("none", environment) == "xla_flags none: none is set"
    xla_flags.set_flags("auto")
    assert flags_line("auto", environment) == f"xla_flags auto: {XLA}={GPU_FLAG}=true, {MEMORY_FRACTION}=0.9"


def test_jaxlib_of_this_environment_knows_the_flags_of_gpus():
    """XLA ends a process at a flag that it does not know, on CPUs too."""
    program = "from jaxlib import _jax; _jax.CompileOptions().executable_build_options.debug_options"
    environment = {**os.environ, XLA: ""}
    add_flags(environment, "cuda12")
    for other, known in (("", True), (" --xla_gpu_of_nobody=true", False)):
        environment[XLA] += other
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
        assert (done.returncode == 0) == known, done.stderr[-2000:]
