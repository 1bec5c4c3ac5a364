"""One signal is a wish, the second one ends the program, and the handlers of before come back."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from train.process.interrupt import SIGNALS, ending_at_once, listening


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_requests_a_stop_second_ends(number, capsys):
    with listening() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested
        assert "stopping after this step" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_previous_signal_handlers_are_restored():
    assert len(SIGNALS) == 3
    before = [signal.getsignal(number) for number in SIGNALS]
    with contextlib.suppress(ZeroDivisionError), listening() as interrupt:
        assert [signal.getsignal(number) for number in SIGNALS] == [interrupt] * 3
        _ = 1 / 0  # also when the block fails
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_elsewhere_ends_the_command(number):
    with ending_at_once(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_inherited_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_during_a_callback_is_not_lost(capsys):
    class Closing:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def command() -> None:
        Closing()
        for _ in range(1000):
            time.sleep(0.001)

    with ending_at_once(), pytest.raises(KeyboardInterrupt):
        command()
    assert capsys.readouterr().err == ""


WAITING = """
import threading, time
from train.process.interrupt import exit_with
threading.Thread(target=time.sleep, args=(600,)).start()
print("ending", flush=True)
exit_with({code})
"""


def test_thread_that_waits_does_not_hold_an_ending_command():
    command = [sys.executable, "-c", WAITING.format(code=2)]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_ends_a_shutdown_that_waits(number):
    command = [sys.executable, "-c", WAITING.format(code=0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ending\n"
            time.sleep(0.5)
            process.send_signal(number)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
