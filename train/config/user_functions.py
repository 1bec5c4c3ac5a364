"""Functions of the user, which a config names: imported and called, with errors that name the field."""

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train.config.errors import UserError
from train.config.signatures import load_function

ROOT = Path(__file__).parents[2]
_OWN = (f"{ROOT / 'train'}/", f"{ROOT / 'kljax'}/", "<frozen ")
_LIBRARIES = tuple(f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_FIRST = 3
"""Lines of a traceback that are shown from its start."""
_LAST = 5
"""Lines of a traceback that are shown from its end."""


def failure(error: BaseException) -> str:
    """Describes what code of the user raised: the error in one line, then the lines of the traceback in user code.

    Lines of packages are shown where there are no others.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OWN)]
    frames = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    left_out = len(frames) - _FIRST - _LAST
    lines = traceback.format_list(frames[:_FIRST] + frames[-_LAST:] if left_out > 0 else frames)
    if left_out > 0:
        lines.insert(_FIRST, f"  ... {left_out} more\n")
    return "\n".join([_one_line(error), *("".join(lines).splitlines())])


def _one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a class of the user's
        text = "an error without a text"
    return f"{type(error).__name__}: {text}"


@contextmanager
def user_code(label: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turns whatever the block raises, SystemExit too, into an error that names the code of the user.

    Args:
      label: the field of the config, and the function.
      kind: the class of the error, which errors of that class keep.

    Raises:
      UserError: of that class, for every exception but KeyboardInterrupt; with the traceback of the user's code.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except UserError as error:
        if isinstance(error, kind):
            raise
        raise kind(f"{label}: {error}") from error
    except BaseException as error:
        raise kind(f"{label}: {failure(error)}") from error


def find_function(field: str, name: str) -> Callable[..., Any]:
    """Imports `module:function` or `path/to/file.py:function`.

    Args:
      field: of the config, for errors.
      name: of the function.

    Raises:
      UserError: the import fails, or the object is not callable.
    """
    try:
        function = load_function(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # any error of the user's module, also SystemExit
        raise UserError(f"{field}: cannot import {name!r}: {failure(error)}") from error
    if not callable(function):
        raise UserError(f"{field}: got {name!r}, a {type(function).__name__}, expected a function")
    return function


def make_with(field: str, name: str, kind: type | None, /, *values: Any, **arguments: Any) -> Any:
    """Calls a function of the user that makes an object of the trainer.

    Args:
      field: of the config, for errors.
      name: of the function.
      kind: a protocol or a dataclass, whose members the object has; None: any object.
      *values: what the trainer passes.
      **arguments: what the config passes.

    Raises:
      UserError: the function cannot be imported or raises, or its result lacks an attribute.
    """
    function = find_function(field, name)
    with user_code(f"{field}: {name} failed"):
        made = function(*values, **arguments)
    if kind is not None:
        check_members(field, name, made, kind)
    return made


def check_members(field: str, name: str, made: Any, kind: type) -> None:
    """Checks that an object that the function `name` of the user made has the members of a protocol or dataclass.

    Raises:
      UserError: it lacks an attribute.
    """
    members = [member for member in {**inspect.get_annotations(kind), **vars(kind)} if not member.startswith("_")]
    missing = [member for member in members if not hasattr(made, member)]
    if missing:
        returned = f"{name} returned {type(made).__name__!r} without {', '.join(missing)}"
        raise UserError(f"{field}: {returned}, expected {', '.join(members)}")
