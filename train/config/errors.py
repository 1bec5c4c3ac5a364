"""Errors that the command line turns into a message instead of a traceback, and warnings."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_SETTINGS = {"warnings": True}


def warn(text: str) -> None:
    """Tells the user something that does not stop the command: a note, or else a warning."""
    if _SETTINGS["warnings"]:
        print(f"{'note' if isinstance(text, Note) else 'warning'}: {text}", file=sys.stderr)


class Note(str):
    """A message about a config that asks for nothing: what it stands for, or what was set for the user."""

    __slots__ = ()


def leave_warnings_to_another_process() -> None:
    """Hides the warnings of this process from now on: another one with the same command shows them."""
    _SETTINGS["warnings"] = False


class UserError(Exception):
    """An error that the user can fix; its text says what was got, what is allowed and how to fix it."""

    code = 2
    """The exit code of the command."""


class GuardError(UserError):
    """The guard stopped the run: numbers that are not finite, or a limit."""

    code = 3


class LostProcessError(UserError):
    """A process of the run is gone; the others end, and the run continues from its last checkpoint."""

    code = 75


class ConfigError(UserError):
    """All problems of one config; `problems` holds one line each."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems)]))


@contextmanager
def field_errors(field: str) -> Iterator[None]:
    """Turns errors of reading into a `UserError` that names a field of the config."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"{field}: {error}") from error
