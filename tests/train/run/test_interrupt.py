"""One signal is a wish, the second one ends the program, and the handlers of before come back."""

import contextlib
import os
import signal

import pytest

from train.run.interrupt import listening


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_and_the_second_an_end(number, capsys):
    with listening() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested
        assert "stopping after this step" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_the_handlers_of_before_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with contextlib.suppress(ZeroDivisionError), listening() as interrupt:
        assert signal.getsignal(signal.SIGINT) is interrupt
        assert signal.getsignal(signal.SIGTERM) is interrupt
        _ = 1 / 0  # also when the block fails
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
