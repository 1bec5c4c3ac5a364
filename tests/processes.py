"""The settings of this process that the processes it starts take over."""

import signal


def hear_interrupts() -> None:
    """Hears Ctrl-C also where a shell started this process, as a background job, to ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
