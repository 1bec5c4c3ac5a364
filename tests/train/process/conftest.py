"""Signals are heard here, whatever the process was started to ignore."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _hears_hang_ups() -> Iterator[None]:
    """Hears a hang-up also under `nohup`, for the time of the tests of signals alone."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
