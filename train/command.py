"""What the commands beside `python -m train` share: exit codes, messages without a traceback, and a quiet orbax."""

import logging
import sys
from collections.abc import Callable

from train.errors import UserError


def run_command(command: Callable[[], None]) -> int:
    """Runs a command; the exit code is 0, 2 for what the user can put right, 130 for Ctrl-C."""
    # What orbax logs below an error, the commands say better themselves.
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        logger.setLevel(before)
    return 0
