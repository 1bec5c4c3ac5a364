"""The process of a command."""

import gc

import pytest

from train.config.errors import UserError
from train.run.console import run_command


def test_a_command_collects_garbage_rarely_and_leaves_the_thresholds_as_they_were(capsys: pytest.CaptureFixture[str]):
    before, inside = gc.get_threshold(), []

    def command() -> None:
        inside.append(gc.get_threshold())
        raise UserError("seed: got x, expected an integer")

    gc.set_threshold(700, 10, 10)
    try:
        assert run_command(command) == 2
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)
    assert inside[0][0] >= 100 * 700
    assert capsys.readouterr().err == "error: seed: got x, expected an integer\n"
