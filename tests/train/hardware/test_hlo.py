"""Reading compiled programs: loops, collectives, cycles and buffers, on small texts that can be counted by hand."""

import pathlib

import pytest

from train.hardware import hlo
from train.hardware.hlo import executions, parse, trip_count

TEXTS = pathlib.Path(__file__).parent / "hlo"
# As the TPU's compiler prints it: tuples with layouts, no trip counts, cycles in the configuration of a kernel.
TPU = (TEXTS / "tpu.txt").read_text()
# As the GPU's compiler prints it: trip counts, asynchronous pairs.
GPU = (TEXTS / "gpu.txt").read_text()
# One gather of an asynchronous fusion, printed with its first and its last step.
ASYNC = (TEXTS / "async.txt").read_text()
ASSIGNMENT = (TEXTS / "assignment.txt").read_text()


def test_computations_and_instructions():
    module = parse(TPU)
    assert module.entry == "main"
    assert [i.opcode for i in module.computations["outer_body"]] == [
        "parameter",
        "all-gather",
        "fusion",
        "while",
        "copy",
    ]
    assert module.computations["inner_condition"][1].shape.startswith("(s32[]{:T(128)}, /*index=1*/f32[4,256]")


def test_a_text_without_a_program_is_an_error():
    with pytest.raises(ValueError, match="expected a compiled module with an ENTRY"):
        parse("HloModule nothing\n")


def test_loops_multiply():
    counts = executions(parse(TPU))
    assert counts["main"] == 1
    assert counts["outer_body"] == counts["all-reduce-scatter"] == 3
    assert counts["inner_body"] == 15
    assert counts["kernel"] == 15 + 1
    assert "kernel" not in executions(parse(TPU), kernels=False)


def test_a_trip_count_that_is_written_down():
    assert executions(parse(GPU))["body"] == 6


@pytest.mark.parametrize("condition", ["", "  %other = s32[] constant(4)\n  %same = s32[] constant(9)\n"])
def test_a_trip_count_that_depends_on_data_is_an_error(condition):
    text = TPU.replace("  %three = s32[]{:T(128)} constant(3)\n", condition)
    module = parse(text)
    loop = next(i for i in module.computations["main"] if i.opcode == "while")
    with pytest.raises(ValueError, match=r"while\.2: got the limits .* expected one constant in outer_condition"):
        trip_count(module, loop)


def test_collectives_by_loops():
    found = {(c.kind, c.payload, c.executions) for c in hlo.collectives(parse(TPU))}
    assert found == {
        ("all-gather", 64 * 128 * 2, 3),
        ("all-reduce", 16 * 256 * 4, 3),  # the scatter that is a kernel of its own
        ("collective-permute", 2 * 8 * 4, 1),  # start and done are one
        ("all-reduce", 2 * 32 * 4, 1),
        ("reduce-scatter", 4 * 2 * 128 * 4, 1),  # what goes in
    }
    most = hlo.collectives(parse(TPU))[0]
    assert most.total == 3 * 64 * 128 * 2 == 3 * 16 * 256 * 4


def test_asynchronous_collectives():
    found = {(c.kind, c.payload, c.executions) for c in hlo.collectives(parse(GPU))}
    assert found == {("all-reduce", 16, 6), ("all-gather", 16, 6), ("reduce-scatter", 32, 6)}


def test_asynchronous_collectives_of_several_arrays():
    text = GPU.replace(
        "(f16[2]{0}, f16[8]{0}) all-gather", "((f16[2]{0}, f16[4,1]{0,1}), (f16[8]{0}, f16[4,4]{0,1})) all-gather"
    )
    gathers = [c.payload for c in hlo.collectives(parse(text)) if c.kind == "all-gather"]
    assert gathers == [2 * (8 + 16)]


def test_steps_of_one_collective_count_once():
    assert [(c.kind, c.payload, c.executions) for c in hlo.collectives(parse(ASYNC))] == [("all-gather", 32, 2)]


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("{{0,4,8},{1,5,9}}", 3),
        ("[4,2]<=[8]", 2),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("mesh['x'=4,'y'=1,'z'=2] {'x','z'}", 8),
        ("@mesh['x'=4,'y'=2] {'y'}", 2),
    ],
)
def test_group_sizes(groups, members):
    assert hlo.group_size(f"  %r = f32[2] reduce-scatter(%a), replica_groups={groups}, dimensions={{0}}") == members


def test_unknown_groups_are_an_error():
    with pytest.raises(ValueError, match="replica_groups: got"):
        hlo.group_size("  %r = f32[2] reduce-scatter(%a), replica_groups=everyone")


def test_bytes_of_types():
    assert hlo.array_bytes("(bf16[3,5]{1,0:T(8,128)(2,1)}, pred[7]{0}, f32[], s4[2])") == [30, 7, 4, 1]


def test_cycles_by_loops():
    # 15 kernels of the inner loop, 3 copies, 1 at the end; nothing inside a kernel, nothing without an estimate.
    assert hlo.estimated_cycles(parse(TPU)) == 15 * 100 + 3 * 10 + 1


def test_largest_buffers():
    assert hlo.largest_buffers(ASSIGNMENT, 1) == [(200, "f32[32], f32[50]")]
    assert hlo.largest_buffers(ASSIGNMENT)[1:] == [(64, "(s32[], f32[32])")]
    assert hlo.largest_buffers("") == []
