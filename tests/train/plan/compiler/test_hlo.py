"""Reading compiled programs: loops and cycles, on small texts that can be counted by hand."""

import pathlib

import pytest

from train.plan.compiler import hlo
from train.plan.compiler.hlo import executions, parse, trip_count

TEXTS = pathlib.Path(__file__).parent / "hlo"
# As the TPU's compiler prints it: tuples with layouts, no trip counts, cycles in the configuration of a kernel.
TPU = (TEXTS / "tpu.txt").read_text()
# As the GPU's compiler prints it: trip counts, asynchronous pairs.
GPU = (TEXTS / "gpu.txt").read_text()


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


def test_metadata_of_several_lines_ends_no_computation():
    """As kernels of TPUs have them: a loop after the kernel counts, and so does what the kernel says."""
    lines = '%k = f32[2] custom-call(%b.1), frontend_attributes={kernel_metadata={\n"xprof_metadata":"{}"\n}}'
    kernel = f'{lines}, metadata={{op_name="jit(f)/kernel"}}, backend_config={{"estimated_cycles":"20"}}'
    module = parse(TPU.replace("  %scatter = ", f"  {kernel}\n  %scatter = "))
    assert executions(module) == executions(parse(TPU))
    (call,) = (i for i in module.computations["outer_body"] if i.opcode == "custom-call")
    assert (call.op_name, call.operands) == ("jit(f)/kernel", ["b.1"])
    assert hlo.estimated_cycles(module) == hlo.estimated_cycles(parse(TPU)) + 3 * 20


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


def test_written_trip_count_is_read():
    assert executions(parse(GPU))["body"] == 6


@pytest.mark.parametrize("condition", ["", "  %other = s32[] constant(4)\n  %same = s32[] constant(9)\n"])
def test_data_dependent_trip_count_is_an_error(condition):
    text = TPU.replace("  %three = s32[]{:T(128)} constant(3)\n", condition)
    module = parse(text)
    loop = next(i for i in module.computations["main"] if i.opcode == "while")
    with pytest.raises(ValueError, match=r"while\.2: got the limits .* expected one constant in outer_condition"):
        trip_count(module, loop)


def test_data_dependent_loop_is_counted_by_its_scope():
    text = TPU.replace("body=%outer_body", 'body=%outer_body, metadata={op_name="jit(f)/decode/while"}')
    loop = next(i for i in parse(text).computations["main"] if i.opcode == "while")
    assert loop.op_name == "jit(f)/decode/while"
    assert trip_count(parse(text), loop, {"decode": 7.5}) == 7.5
    assert trip_count(parse(text), loop, {"code": 7.5}) == 3
    assert trip_count(parse(text), loop, {"decode": 7.5, "jit(f)/decode": 8.5}) == 8.5
    assert executions(parse(text), expected={"decode": 7})["inner_body"] == 35
    wrapped = parse(text.replace("/decode/", "/transpose(jvp(decode))/"))
    assert executions(wrapped, expected={"decode": 7})["inner_body"] == 35


def test_operands_and_called_computations():
    lines = {item.name: item for item in parse(TPU).computations["outer_body"]}
    assert lines["scatter"].operands == ["b.1"]
    assert lines["scatter"].called("calls") == "all-reduce-scatter"
    assert lines["copy"].called("calls") == ""
    typed = "  %z = f32[2]{0:T(128)} fusion(f32[2]{0:T(128)} %x, (f32[2], s32[]) %y.1), kind=kLoop, calls=%k\n"
    (single,) = parse(f"ENTRY %main () -> f32[2] {{\n{typed}}}\n").computations["main"]
    assert single.operands == ["x", "y.1"]


def test_bytes_of_types():
    assert hlo.array_bytes("(bf16[3,5]{1,0:T(8,128)(2,1)}, pred[7]{0}, f32[], s4[2])") == [30, 7, 4, 1]


def test_cycles_by_loops():
    # 15 kernels of the inner loop, 3 copies, 1 at the end; nothing inside a kernel, nothing without an estimate.
    assert hlo.estimated_cycles(parse(TPU)) == 15 * 100 + 3 * 10 + 1
