"""Topologies by name, and the table of devices."""

import os
import re
import subprocess
import sys

import pytest

from train.config.errors import UserError
from train.models.devices import DEVICES, find_device
from train.plan.compiler import topology
from train.plan.compiler.topology import Topology, check_compiler, gpu_target, parse_topology


@pytest.mark.parametrize(
    ("text", "slices", "shape", "size"),
    [
        ("v5e:1x1", 1, (1, 1), 1),
        ("v5e:4x8", 1, (4, 8), 32),
        ("v5p:4x4x4", 2, (4, 4, 4), 128),
        ("v5p:2x4x4", 1, (2, 4, 4), 32),
        ("v6e:16x16", 1, (16, 16), 256),
        ("tpu7x:4x4x8", 1, (4, 4, 8), 256),
        ("v4:2x2x1", 1, (2, 2, 1), 8),
        ("h200:8", 1, (1, 8), 8),
        ("h100:8x8", 1, (8, 8), 64),
    ],
)
def test_names(text, slices, shape, size):
    parsed = parse_topology(text, slices)
    assert (parsed.device.name, parsed.shape, parsed.slices, parsed.size) == (text.split(":")[0], shape, slices, size)


@pytest.mark.parametrize(
    "text",
    [
        "v5p",
        "v5p:",
        "v5litepod:4x4",
        "V5e:4x4",
        "v5e:4x",
        "v5e:4x4.0",
        "v5e:-4x4",
        "v5e:0x0",
        "4x4",
        "",
        "v5e:4x\uff14",
    ],
)
def test_an_unknown_name_is_answered_with_examples(text):
    with pytest.raises(UserError, match=rf"topology: got '{re.escape(text)}', expected "):
        parse_topology(text)


@pytest.mark.parametrize("text", ["v5e:32x32", "v5e:8x4", "v6e:4x4x4", "v5e:16"])
def test_unavailable_flat_slice_is_refused(text):
    with pytest.raises(UserError, match=r"expected v[56]e: and one of 1x1, 2x2, 2x4, 4x4, "):
        parse_topology(text)


@pytest.mark.parametrize("text", ["v5p:3x3x3", "v5p:8x4x4", "v5p:16x16x28", "v5p:4x4", "v5p:4x4x6", "tpu7x:1x1x1"])
def test_unavailable_torus_is_refused(text):
    with pytest.raises(UserError, match=r"expected .* three ascending multiples of 4 with at most [0-9]+ chips"):
        parse_topology(text)


@pytest.mark.parametrize("text", ["h100:16", "h200:8x9", "h100:1x1x8"])
def test_a_host_has_eight_gpus(text):
    with pytest.raises(UserError, match="expected hosts x GPUs of a host, at most 8"):
        parse_topology(text)


def test_zero_slices_are_refused():
    with pytest.raises(UserError, match="slices: got 0, expected at least 1"):
        parse_topology("v5e:4x4", 0)


def test_a_topology_is_printed_as_it_is_named():
    assert str(parse_topology("v5p:4x4x4")) == "v5p:4x4x4"
    assert str(parse_topology("v5p:4x4x4", 2)) == "v5p:4x4x4 x 2 slices"


@pytest.mark.parametrize(("name", "package"), [("v5e:4x4", "libtpu"), ("h200:8", "jax-cuda12-plugin")])
def test_missing_compiler_error_names_its_installation(monkeypatch, name, package):
    monkeypatch.setattr(topology.util, "find_spec", lambda module: None)
    with pytest.raises(
        UserError, match=f"needs {package}, which is not installed here; `uv sync --group aot` installs it"
    ):
        check_compiler(parse_topology(name))


def test_compilers_of_both_cuda_versions_are_known(monkeypatch):
    """Newer releases of JAX come with CUDA 13."""
    for present in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        monkeypatch.setattr(topology.util, "find_spec", lambda module, present=present: module == present or None)
        check_compiler(parse_topology("h100:1"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_devices_are_found_by_their_jax_kind(kind, name):
    assert find_device(kind) == DEVICES[name]


@pytest.mark.parametrize("kind", ["cpu", "TPU v3", "NVIDIA A100-SXM4-80GB", ""])
def test_other_devices_have_no_row(kind):
    assert find_device(kind) is None


def test_chip_rates_equal_the_data_sheet():
    """Gbit/s and TFLOP/s of a whole chip, as the vendors print them."""
    sheets = {
        "v4": (275, 1228, 2400),
        "v5e": (197, 819, 1600),
        "v5p": (459, 2765, 4800),
        "v6e": (918, 1638, 3200),
        "tpu7x": (2307, 7380, 4800),
        "h100": (989, 3350, 3600),
        "h200": (989, 4800, 3600),
    }
    assert sheets.keys() == DEVICES.keys()
    for name, (teraflops, gigabytes, gigabits) in sheets.items():
        device = DEVICES[name]
        chip = (device.flops / 1e12, device.bandwidth / 1e9, device.links * 8 / 1e9)
        assert tuple(device.per_chip * rate for rate in chip) == pytest.approx((teraflops, gigabytes, gigabits))


def test_compiler_of_gpus_knows_the_listed_devices():
    for device in DEVICES.values():
        if device.platform == "cuda":
            text = gpu_target(device.name)
            assert f"device_memory_size: {device.memory}\n" in text
            assert f"memory_bandwidth: {device.bandwidth:.0f}\n" in text
            assert f'device_description_str: "{device.kinds[0]}' in text


def test_topologies_compare_by_value():
    assert Topology(DEVICES["v5e"], (4, 4)) == parse_topology("v5e:4x4")


def test_compilers_load_without_devices_of_this_machine():
    """The environment may name no platform, and JAX may have read it before."""
    code = "import jax; from train.plan.compiler.topology import load_compilers as load; load()"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    run = subprocess.run(
        [sys.executable, "-c", f"{code}; print(jax.config.jax_platforms)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "cpu\n"
