"""Helpers of the commands: exit codes, messages without a traceback, a quiet orbax, rare garbage collections."""

import argparse
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from train.config.errors import UserError, warn
from train.config.load import LoadedConfig, load


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Hides orbax's messages below an error inside the block; the trainer reports those events itself."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Lets Python search for unused cycles of objects rarely inside the block.

    Tracing makes many objects that live long: by default the searches take over a quarter of the time of a short run.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def load_config(path: str | Path, overrides: Sequence[str]) -> LoadedConfig:
    """Loads a config with overrides on top, and prints its warnings."""
    loaded = load(path, overrides)
    for warning in loaded.warnings:
        warn(warning)
    return loaded


def run_command(command: Callable[[], int | None]) -> int:
    """Runs a command; returns its exit code or 0, 130 for Ctrl-C.

    An error that the user can fix gives its own code: 2, or 3 if the guard stopped the run.
    """
    try:
        with quiet_orbax(), rare_collections():
            return command() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


class ShowVersion(argparse.Action):
    """The `--version` flag of a command. The library is imported only when the flag is used: it loads JAX."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Prints the version of the package, which the trainer shares with the library."""
        import kljax

        print(f"kljax {kljax.__version__}")
        parser.exit()
