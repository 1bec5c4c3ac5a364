"""The largest buffers, on a small report that can be read by hand."""

import pathlib

from train.plan.compiler.buffers import largest_buffers

ASSIGNMENT = (pathlib.Path(__file__).parent / "hlo" / "assignment.txt").read_text()
PROGRAM = """
  %copy = f32[50]{0} copy(%x), metadata={op_name="jit(f)/prefill/copy" stack_frame_id=3}
  %fusion.1 = f32[32]{0} fusion(%x), kind=kLoop, calls=%f, metadata={op_name="jit(f)/other"}
"""


def test_largest_buffers():
    assert largest_buffers(ASSIGNMENT, 1) == [(200, "f32[32], f32[50]", "")]
    assert largest_buffers(ASSIGNMENT)[1:] == [(64, "(s32[], f32[32])", "")]
    assert largest_buffers("") == []


def test_origin_comes_from_the_largest_value():
    assert [entry.origin for entry in largest_buffers(ASSIGNMENT, program=PROGRAM)] == ["jit(f)/prefill/copy", ""]
