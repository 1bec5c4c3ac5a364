"""An axis of -1 takes the devices that the others leave: at once where they are known, else when they are counted."""

import pytest

from tests.train.config.built import build, problems
from train.config.errors import ConfigError, UserError
from train.config.load import dump_yaml, fill_mesh, parse
from train.config.yaml_text import parse_yaml
from train.plan.__main__ import config_on_slices
from train.plan.compiler.topology import parse_topology

ROWS = ("optim={updates_per_batch: 1, micro_batches: 1}",)
HEADS = "model={heads: 8, kv_heads: 8}"


@pytest.mark.parametrize(
    ("overrides", "devices", "sizes"),
    [
        (("mesh.data=-1",), 8, {"data": 8}),
        (("mesh.data=-1",), 1, {"data": 1}),
        (("mesh={data: 2, fsdp: -1}",), 8, {"data": 2, "fsdp": 4}),
        (("mesh={data: 2, tensor: -1}", HEADS), 4, {"data": 2, "tensor": 2}),
        (("mesh={data: -1, tensor: 2, slices: 2}",), 8, {"data": 4, "tensor": 2}),
        (("mesh={fsdp: -1, tensor: 2, slices: 2, slice_axis: fsdp}",), 8, {"fsdp": 4, "tensor": 2}),
        (("mesh={fsdp: 2}",), 8, {"fsdp": 2}),
    ],
)
def test_axis_takes_the_remaining_devices(overrides, devices, sizes):
    mesh = fill_mesh(build(*overrides)[0], devices).mesh
    assert {axis: size for axis, size in mesh.axes().items() if size > 1} == {a: n for a, n in sizes.items() if n > 1}


@pytest.mark.parametrize(
    ("mesh", "sampling", "devices", "filled"),
    [
        ("{data: -1}", "{data: -1, tensor: 1}", 8, (8, 1)),
        ("{fsdp: -1}", "{data: -1, tensor: 4}", 8, (2, 4)),
        ("{fsdp: 4, tensor: 2}", "{data: -1, tensor: 2}", 8, (4, 2)),
        ("{fsdp: 4, data: -1}", "{data: 4, tensor: -1}", 8, (4, 2)),
    ],
)
def test_sampling_mesh_takes_the_devices_of_the_mesh(mesh, sampling, devices, filled):
    config = fill_mesh(build(f"mesh={mesh}", f"rollout.mesh={sampling}", HEADS)[0], devices)
    assert config.rollout.mesh is not None
    assert (config.rollout.mesh.data, config.rollout.mesh.tensor) == filled


def test_config_of_a_run_keeps_the_axis():
    config, _ = build("mesh.data=-1")
    assert parse(parse_yaml(dump_yaml(config))[0])[0] == config


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ("mesh={data: -1, fsdp: -1}",),
            "mesh.fsdp: got -1, but mesh.data is -1 too, and one axis alone takes all remaining devices; set a size",
        ),
        (
            ("rollout.mesh={data: -1, tensor: -1}",),
            "rollout.mesh.tensor: got -1, but rollout.mesh.data is -1 too, and one axis alone takes all remaining",
        ),
        (("mesh.data=0",), "mesh.data: got 0 (no devices), expected an integer >= 1 and <= 1_000_000_000, or -1"),
        (("mesh.data=-2",), "mesh.data: got -2, expected an integer >= 1 and <= 1_000_000_000, or -1"),
        (("mesh.slices=-1",), "mesh.slices: got -1, expected an integer >= 1"),
        (("mesh={fsdp: 4, slices: 3, slice_axis: fsdp}",), "mesh.slices: got 3, expected a divisor of mesh.fsdp = 4"),
        (("mesh.slice_axis=tensor",), "mesh.slice_axis: got 'tensor', expected one of data, fsdp"),
        # Known sizes alone decide these, whatever the number of devices.
        (("mesh={data: -1, tensor: 3}",), "model.heads: got 4, expected a multiple of mesh.tensor = 3"),
        (("mesh={data: -1, fsdp: 3}",), "a micro-batch has"),
        (
            ("mesh={fsdp: 4, tensor: 1}", "rollout.mesh={data: -1, tensor: 8}", HEADS),
            "rollout.mesh: got -1 beside tensor=8, which does not divide the 4 devices",
        ),
        (
            ("mesh={fsdp: 4, tensor: 2}", "rollout.mesh={data: 1, tensor: -1}", "model={heads: 4, kv_heads: 4}"),
            "model.heads: got 4, expected a multiple of rollout.mesh.tensor = 8",
        ),
    ],
)
def test_axis_that_cannot_be_filled_is_refused(overrides, text):
    assert [line for line in problems(*overrides) if text in line], problems(*overrides)


def test_devices_that_do_not_fit_are_refused():
    config, _ = build("mesh={data: -1, tensor: 2}")
    with pytest.raises(UserError, match=r"^mesh: got -1 beside tensor=2, which does not divide the 3 devices$"):
        fill_mesh(config, 3)
    with pytest.raises(ConfigError, match=r"(?s)^mesh of 48 devices: .*a micro-batch has .* expected a multiple of"):
        fill_mesh(config, 48)
    config, _ = build("mesh={data: -1}", "rollout.mesh={data: 4, tensor: 1}")
    assert fill_mesh(config, 4).mesh.data == 4
    with pytest.raises(ConfigError, match=r"got data=4 x tensor=1 = 4 devices, expected the 8 of mesh\.data"):
        fill_mesh(config, 8)


def test_plan_repeats_the_asked_axis_on_other_slices():
    overrides = ["mesh={fsdp: 4, slice_axis: fsdp}", *ROWS]
    loaded = config_on_slices("configs/smoke.yaml", overrides, parse_topology("v5e:2x2", 2), any_mesh=False)
    assert (loaded.config.mesh.data, loaded.config.mesh.fsdp, loaded.config.mesh.slices) == (1, 8, 2)


@pytest.mark.parametrize(("slices", "data"), [(1, 4), (2, 8)])
def test_plan_fills_the_axis_with_its_topology(slices, data):
    topology = parse_topology("v5e:2x2", slices)
    loaded = config_on_slices("configs/smoke.yaml", ["mesh.data=-1", *ROWS], topology, any_mesh=False)
    assert (loaded.config.mesh.data, loaded.config.mesh.slices) == (data, slices)
    with pytest.raises(UserError, match="mesh: got -1 beside fsdp=8, which does not divide the 4 devices"):
        config_on_slices(
            "configs/smoke.yaml", ["mesh={data: -1, fsdp: 8}", *ROWS], parse_topology("v5e:2x2"), any_mesh=False
        )
