"""Addresses of object stores, as `s3://bucket/name`, which are no paths of this machine."""

import argparse
import os
import re
from pathlib import Path

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(s3|gs|az|hf):/")


def is_address(text: str | os.PathLike[str]) -> bool:
    """Whether a text, or a path made of it, is an address and no path of this machine.

    Example:
        >>> [is_address(text) for text in ("s3://bucket/run", "gs:/bucket/run", "./s3:/run", "runs")]
        [True, True, False, False]
    """
    return bool(ADDRESS.match(os.fspath(text)))


def local_problem(text: str) -> str:
    """Returns the reason why a text is no path of this machine, or no text if it may be one.

    Example:
        >>> local_problem("s3://bucket/run")
        'an address; mount the bucket, and name a path of the mount'
    """
    return "an address; mount the bucket, and name a path of the mount" if is_address(text) else ""


def local_argument(text: str) -> Path:
    """Reads an argument of a command line that has to be a path of this machine."""
    if problem := local_problem(text):
        raise argparse.ArgumentTypeError(f"got {text!r} ({problem})")
    return Path(text)
