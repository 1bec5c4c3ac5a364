"""The API key of a server, from an environment variable or a file."""

import os
import re
from pathlib import Path

from train.config.errors import UserError

LONGEST = 2**13


def read_key(field: str, *, env: str | None, file: str | None) -> str | None:
    """Reads the key in the environment variable `env` or in a file, without spaces around it; None if neither is set.

    Args:
      field: what the names of both fields begin with, for errors: `rollout.source.api_key_`.
      env: the variable.
      file: the file, in place of the variable.

    Raises:
      UserError: there is no key, or it cannot be sent; never shows it.
    """
    if file is not None:
        name = f"{field}file"
        source = f"the file {file!r}"
        text = _read_file(name, file)
    elif env is not None:
        name = f"{field}env"
        source = f"the variable {env!r}"
        if (value := os.environ.get(env)) is None:
            raise UserError(f"{name}: the environment has no variable {env!r}")
        text = value
    else:
        return None
    key = text.strip()
    if not key:
        raise UserError(f"{name}: {source} is empty")
    if not re.fullmatch("[!-~]+", key) or len(key) > LONGEST:
        raise UserError(f"{name}: expected one key of at most {LONGEST} ASCII characters without spaces in {source}")
    return key


def _read_file(name: str, path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(2 * LONGEST).decode("ascii", errors="replace")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{name}: cannot read {path!r}: {reason}") from error
