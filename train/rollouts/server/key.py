"""The API key of a server, from an environment variable or a file."""

import os
import re
from pathlib import Path

from train.config.errors import UserError
from train.config.rollout import OpenAISourceSection

LONGEST = 2**13


def read_key(section: OpenAISourceSection) -> str | None:
    """Reads the key that `api_key_env` or `api_key_file` names, without spaces around it; None if neither is set.

    Raises:
      UserError: there is no key, or it cannot be sent; never shows it.
    """
    if section.api_key_file is not None:
        field = "api_key_file"
        source = f"the file {section.api_key_file!r}"
        text = _read_file(section.api_key_file)
    elif section.api_key_env is not None:
        field = "api_key_env"
        source = f"the variable {section.api_key_env!r}"
        if (value := os.environ.get(section.api_key_env)) is None:
            raise UserError(f"rollout.source.{field}: the environment has no variable {section.api_key_env!r}")
        text = value
    else:
        return None
    key = text.strip()
    if not key:
        raise UserError(f"rollout.source.{field}: {source} is empty")
    if not re.fullmatch("[!-~]+", key) or len(key) > LONGEST:
        raise UserError(
            f"rollout.source.{field}: expected one key of at most {LONGEST} ASCII characters without spaces in {source}"
        )
    return key


def _read_file(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(2 * LONGEST).decode("ascii", errors="replace")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"rollout.source.api_key_file: cannot read {path!r}: {reason}") from error
