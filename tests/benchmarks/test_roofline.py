"""The table of plans; `make test-aot` compiles one of them."""

import dataclasses

import pytest

from benchmarks import roofline
from benchmarks.roofline import LAYERS, ProgramWork, row

WORK = ProgramWork(
    moved=1.6e12,
    flops=4.4e14,
    seconds={"h100": 0.7411, "h200": 0.648},
    launches=17489.0,
    temporary=3 * 2**29,
    layer=3.48e9,
    decode=14 * LAYERS,
)


def test_unknown_program_is_named(capsys):
    with pytest.raises(SystemExit):
        roofline.main(["--programs", "update,x"])
    assert "argument --programs: got ['x'], expected some of ['sample', 'score', 'update']" in capsys.readouterr().err


def test_rows_show_a_layer_of_whole_rows_and_the_kernels_of_a_decode_step():
    assert row("update", "LoRA", WORK) == "| update, LoRA | 1,600 | 440 | 741 / 648 | 17,489 | 1.5 | 3.48 |  |"
    sampled = dataclasses.replace(WORK, layer=0.0)
    assert row("sample", "LoRA", sampled).endswith("| 1.5 |  | 14.0 |")
