"""What a run leaves in the process that it ran in."""

import logging

import pytest

from train import run as run_module
from train.config import load
from train.errors import UserError

LOGGERS = ("absl", "asyncio")


def test_loggers_are_at_their_levels_again_after_a_run(monkeypatch):
    during = {}

    def setting(config):
        during.update({name: logging.getLogger(name).getEffectiveLevel() for name in LOGGERS})
        raise UserError("stopped")

    before = {name: logging.getLogger(name).level for name in LOGGERS}
    monkeypatch.setattr(run_module, "make_setting", setting)
    with pytest.raises(UserError, match="stopped"):
        run_module.run(load("configs/smoke.yaml"))
    assert during["absl"] == logging.ERROR
    assert {name: logging.getLogger(name).level for name in LOGGERS} == before
