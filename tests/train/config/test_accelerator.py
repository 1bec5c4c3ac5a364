"""The accelerator of a machine by its device files, and JAX for it."""

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.markers import Marker

from tests.integration.command import ROOT
from train.config.accelerator import find_accelerator, idle_accelerator

DRIVER = "NVRM version: NVIDIA UNIX {}Kernel Module for x86_64  {}.65.06  Release Build  (root@builder)\n"
MACHINES = {
    "no device": ({}, "cpu"),
    "driver of CUDA 13": ({"dev/nvidia0": "", "proc/driver/nvidia/version": DRIVER.format("Open ", 580)}, "cuda13"),
    "older driver": ({"dev/nvidia3": "", "proc/driver/nvidia/version": DRIVER.format("x86_64 ", 550)}, "cuda12"),
    "container without a version": ({"dev/nvidia0": "", "dev/nvidiactl": ""}, "cuda13"),
    "driver without a GPU": ({"dev/nvidiactl": "", "proc/driver/nvidia/version": DRIVER.format("", 580)}, "cpu"),
    "TPU v4": ({"dev/accel0": ""}, "tpu"),
    "TPU v6e": ({"dev/vfio/0": "", "dev/vfio/vfio": "", "sys/bus/pci/devices/0000:00:04.0/vendor": "0x1ae0\n"}, "tpu"),
    "another device by VFIO": ({"dev/vfio/0": "", "sys/bus/pci/devices/0000:00:04.0/vendor": "0x8086\n"}, "cpu"),
}


@pytest.mark.parametrize(("files", "expected"), MACHINES.values(), ids=MACHINES)
def test_accelerator_is_found_by_its_device_files(files, expected, tmp_path):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert find_accelerator(tmp_path) == expected
    warning = idle_accelerator(tmp_path)
    if expected == "cpu":
        assert warning is None
    else:
        assert f"make train ACCELERATOR={expected} " in warning


def test_accelerator_is_found_before_the_environment_is_there():
    command = (sys.executable, "-I", "-S", "-c", "import sys; sys.path.insert(0, '.'); import train.config.accelerator")
    subprocess.run(command, cwd=ROOT, check=True)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize(
    ("extra", "package"), [("cuda12", "jax-cuda12-plugin"), ("cuda13", "jax-cuda13-plugin"), ("tpu", "libtpu")]
)
def test_lock_file_has_jax_for_each_accelerator(extra, package, python):
    uv = Path(sys.executable).with_name("uv")
    command = (uv, "export", "--frozen", "--no-hashes", "--no-default-groups", "--no-emit-project", "--no-header")
    options = ("--no-annotate", "--extra", "train", "--extra", extra)
    export = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    chosen = [line.partition(" ; ") for line in export.splitlines()]
    markers = {"python_full_version": f"{python}.0", "sys_platform": "linux", "platform_machine": "x86_64"}
    names = [text for text, _, marker in chosen if not marker or Marker(marker).evaluate(markers)]
    found = {name: version for name, _, version in (text.partition("==") for text in names)}
    assert package in found
    assert "plugin" not in package or found[package] == found["jax"]
