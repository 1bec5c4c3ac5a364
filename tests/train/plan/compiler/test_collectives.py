"""Collectives of compiled programs, on small texts that can be counted by hand, and the bytes that they send."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train.plan.compiler.collectives import Collective, bytes_by_kind, collectives, group_members, sent
from train.plan.compiler.hlo import parse

TEXTS = pathlib.Path(__file__).parent / "hlo"
TPU = (TEXTS / "tpu.txt").read_text()
GPU = (TEXTS / "gpu.txt").read_text()
# One gather of an asynchronous fusion, printed with its first and its last step.
ASYNC = (TEXTS / "async.txt").read_text()


def test_collectives_by_loops():
    operations = {(c.kind, c.payload, c.executions) for c in collectives(parse(TPU))}
    assert operations == {
        ("all-gather", 64 * 128 * 2, 3),
        ("all-reduce", 16 * 256 * 4, 3),  # the scatter that is a kernel of its own
        ("collective-permute", 2 * 8 * 4, 1),  # start and done are one
        ("all-reduce", 2 * 32 * 4, 1),
        ("reduce-scatter", 4 * 2 * 128 * 4, 1),  # what goes in
    }
    most = collectives(parse(TPU))[0]
    assert most.total == 3 * 64 * 128 * 2 == 3 * 16 * 256 * 4


def test_asynchronous_collectives():
    operations = {(c.kind, c.payload, c.executions) for c in collectives(parse(GPU))}
    assert operations == {("all-reduce", 16, 6), ("all-gather", 16, 6), ("reduce-scatter", 32, 6)}


def test_asynchronous_collectives_of_several_arrays():
    text = GPU.replace(
        "(f16[2]{0}, f16[8]{0}) all-gather", "((f16[2]{0}, f16[4,1]{0,1}), (f16[8]{0}, f16[4,4]{0,1})) all-gather"
    )
    gathers = [c.payload for c in collectives(parse(text)) if c.kind == "all-gather"]
    assert gathers == [2 * (8 + 16)]


def test_steps_of_one_collective_count_once():
    assert [(c.kind, c.payload, c.executions) for c in collectives(parse(ASYNC))] == [("all-gather", 32, 2)]


@pytest.mark.parametrize(
    ("groups", "devices", "members"),
    [
        ("{{0,4,8},{1,5,9}}", 12, [[0, 4, 8], [1, 5, 9]]),
        ("{}", 3, [[0, 1, 2]]),
        ("[4,2]<=[8]", 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", 8, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(2,0,1)", 8, [[0, 2], [4, 6], [1, 3], [5, 7]]),
        ("mesh['x'=2,'y'=1,'z'=2] {'x','z'}", 4, [[0, 1, 2, 3]]),
        ("@mesh['x'=4,'y'=2] {'x'}", 8, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['x'=2,'y'=1,'z'=4], device_ids=([4,2]T(1,0)) {'x'}", 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,2,0) {'x'}", 4, [[3, 2], [1, 0]]),
        ("mesh['x'=8] {'x':(2)2}", 8, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['x'=4,'y'=2] {'x':(1)2,'y'}", 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("@mesh['x'=4,'y'=2] {'y'}", 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_members_of_groups(groups, devices, members):
    assert group_members(groups, devices) == members


@pytest.mark.parametrize(
    "groups",
    ["{{0,1},{2,3}}", "{}", "[2,2]<=[4]", "[2,2]<=[2,2]T(1,0)", "mesh['x'=2,'y'=2] {'x','y'}",
     "mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}"],
)  # fmt: skip
@pytest.mark.parametrize(
    "after", ["", ", use_global_device_ids=true, to_apply=%add", ', metadata={op_name="a {b}, c"}']
)
def test_groups_are_read_from_the_line(groups, after):
    text = (
        f"ENTRY %main (a: f32[2]) -> f32[2] {{\n  %r = f32[2]{{0}} all-reduce(%a), replica_groups={groups}{after}\n}}\n"
    )
    assert [operation.groups for operation in collectives(parse(text))] == [groups]


def test_unknown_groups_are_an_error():
    with pytest.raises(ValueError, match="replica_groups: got 'everyone'"):
        group_members("everyone", 2)


def make(kind: str, groups: str) -> Collective:
    return Collective(kind, "f32[]", payload=240, executions=2, groups=groups)


@pytest.mark.parametrize(
    ("kind", "groups", "islands", "expected"),
    [
        # Each of 4 devices has a quarter and lacks three.
        ("all-gather", "{{0,1,2,3}}", [0] * 4, (360, 0)),
        ("reduce-scatter", "{{0,1,2,3}}", [0] * 4, (360, 0)),
        ("all-reduce", "{{0,1,2,3}}", [0] * 4, (720, 0)),
        ("all-gather", "{{0},{1}}", [0] * 2, (0, 0)),
        # Each pair is in one island.
        ("all-gather", "{{0,1},{2,3}}", [0, 0, 1, 1], (240, 0)),
        # Each pair is in two islands, and nobody shares its part of the network.
        ("all-gather", "{{0,2},{1,3}}", [0, 0, 1, 1], (0, 240)),
        # Half of the payload comes from the other island, a half of it to each of the two devices here.
        ("all-gather", "{{0,1,2,3}}", [0, 0, 1, 1], (240, 120)),
        ("all-reduce", "{{0,1,2,3}}", [0, 0, 1, 1], (480, 240)),
        ("collective-permute", "{{0,1},{1,2},{2,3},{3,0}}", [0, 0, 1, 1], (240, 240)),
        ("collective-permute", "{{0,1},{1,0}}", [0, 0], (480, 0)),
    ],
)
def test_bytes_sent_by_a_device(kind, groups, islands, expected):
    assert sent(make(kind, groups), islands) == expected


def test_bytes_sent_between_slices():
    text = """ENTRY %main (a: f32[2,8]) -> f32[2,8] {
  %send.1 = (f32[2,8]{1,0:T(8,128)}, u32[], token[]) send(%a, %t), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_megascale_reduce_operation="SUM",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv.1 = (f32[2,8]{1,0:T(8,128)}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %send.2 = (f32[2,8]{1,0:T(8,128)}, u32[], token[]) send(%a, %t), channel_id=3, is_host_transfer=true
}
"""  # noqa: E501
    (operations,) = collectives(parse(text))
    assert (operations.kind, operations.payload, operations.executions) == ("slices all_reduce", 64, 1)
    assert sent(operations, [0, 0, 1, 1]) == (0, 64)


def test_kinds_are_summed():
    actual = [make("all-gather", "{}"), make("all-reduce", "{}"), make("all-reduce", "{{0,1}}")]
    assert bytes_by_kind(actual) == {"all-reduce": (4, 960), "all-gather": (2, 480)}
    assert list(bytes_by_kind(actual)) == ["all-reduce", "all-gather"]


def test_host_program_with_a_gathering_loop():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    layers, width = 5, 8
    abstract = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    weights = abstract((layers, width, width), sharding=NamedSharding(mesh, P(None, "a")))
    x = abstract((4, width), sharding=NamedSharding(mesh, P("b")))

    def run(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            full = jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, P()))
            return jnp.sin(x @ full), None

        return jax.lax.scan(layer, x, weights)[0]

    text = jax.jit(run).lower(weights, x).compile().as_text()
    (gather,) = [operation for operation in collectives(parse(text)) if operation.kind == "all-gather"]
    assert (gather.payload, gather.executions) == (width * width * 4, layers)
    assert sorted(map(sorted, group_members(gather.groups, 4))) == [[0, 2], [1, 3]]
