"""Reports of reads that a failure left behind are dropped however late they come; all others are handed on."""

import logging
import sys
from types import SimpleNamespace

import pytest

from train.weights.late_read_errors import quiet_abandoned_reads


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    return seen


def report(error: BaseException) -> SimpleNamespace:
    unraisable = SimpleNamespace(exc_type=type(error), exc_value=error)
    sys.unraisablehook(unraisable)  # type: ignore[arg-type]
    return unraisable


def test_only_closed_event_loops_are_dropped(reported: list[object]) -> None:
    quiet_abandoned_reads()
    report(RuntimeError("Event loop is closed"))
    assert reported == []
    others = [report(RuntimeError("Event loop is running")), report(ValueError("Event loop is closed"))]
    assert reported == others


def test_the_hook_is_put_in_place_once(reported: list[object]) -> None:
    quiet_abandoned_reads()
    hook = sys.unraisablehook
    quiet_abandoned_reads()
    assert sys.unraisablehook is hook


@pytest.mark.parametrize("kind", ["Future", "Task"])
def test_unrequested_failures_are_not_logged(reported, caplog, kind: str) -> None:
    quiet_abandoned_reads()
    logging.getLogger("asyncio").error(f"{kind} exception was never retrieved\nfuture: <...>")
    assert not caplog.records
    logging.getLogger("asyncio").error("Executing took 3 seconds")
    assert len(caplog.records) == 1
