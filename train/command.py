"""What the commands beside `python -m train` share: exit codes, messages without a traceback, and a quiet orbax."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from train.errors import UserError


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps back what orbax logs below an error; this program says it better itself. Then the level is as it was."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def run_command(command: Callable[[], None]) -> int:
    """Runs a command; the exit code is 0, 2 for what the user can put right, 130 for Ctrl-C."""
    try:
        with quiet_orbax():
            command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
