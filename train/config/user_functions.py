"""Functions of the user, which a config names: imported and called, with errors that name the field."""

import inspect
from collections.abc import Callable
from typing import Any

from train.config.errors import UserError
from train.config.signatures import load_function


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
        raise UserError(f"{field}: cannot import {name!r}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UserError(f"{field}: got {name!r}, a {type(function).__name__}, expected a function")
    return function


def make_with(field: str, name: str, kind: type, /, *values: Any, **arguments: Any) -> Any:
    """Calls a function of the user that makes an object of the trainer.

    Args:
      field: of the config, for errors.
      name: of the function.
      kind: a protocol or a dataclass, whose members the object has.
      *values: what the trainer passes.
      **arguments: what the config passes.

    Raises:
      UserError: the function cannot be imported or raises, or its result lacks an attribute.
    """
    function = find_function(field, name)
    try:
        made = function(*values, **arguments)
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:  # any error of the user's function, also SystemExit
        raise UserError(f"{field}: {name} failed: {type(error).__name__}: {error}") from error
    members = [member for member in {**inspect.get_annotations(kind), **vars(kind)} if not member.startswith("_")]
    missing = [member for member in members if not hasattr(made, member)]
    if missing:
        returned = f"{name} returned {type(made).__name__!r} without {', '.join(missing)}"
        raise UserError(f"{field}: {returned}, expected {', '.join(members)}")
    return made
