"""What the commands share: exit codes, messages without a traceback, and a quiet orbax."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from train.config.errors import UserError, warn
from train.config.load import LoadedConfig, load


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


def load_config(path: str | Path, overrides: Sequence[str]) -> LoadedConfig:
    """The config of a file with overrides on top; what the user should be told about it is."""
    loaded = load(path, overrides)
    for warning in loaded.warnings:
        warn(warning)
    return loaded


def run_command(command: Callable[[], int | None]) -> int:
    """Runs a command; the exit code is its own or 0, 2 for what the user can put right, 130 for Ctrl-C."""
    try:
        with quiet_orbax():
            return command() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
