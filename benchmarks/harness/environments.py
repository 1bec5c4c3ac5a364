"""Virtual environments of contenders, apart from that of this project."""

import pathlib
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.harness.process import ROOT


def interpreter(venv: pathlib.Path) -> pathlib.Path:
    """Returns the path of an environment's interpreter, whether it exists or not."""
    return venv.absolute() / "bin/python"


def missing(directory: pathlib.Path | None, paths: Sequence[pathlib.Path], option: str) -> str | None:
    """Explains which path of the directory given with `--OPTION` is missing, or returns None if none is."""
    if directory is None:
        return f"no --{option} was given; make it with --make-{option} DIR"
    absent = [path for path in paths if not path.exists()]
    return f"{absent[0]} is missing; make it with --make-{option} {directory}" if absent else None


def make(venv: pathlib.Path, *installs: Sequence[str], python: str = sys.executable) -> None:
    """Makes an environment if there is none, and calls `pip install` with each list of arguments."""
    if not interpreter(venv).exists():
        subprocess.run([python, "-m", "venv", str(venv.absolute())], check=True)
    pip = [str(interpreter(venv)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for arguments in installs:
        subprocess.run([*pip, *arguments], check=True)


def find_python312(path: str | None) -> str:
    """Returns a Python 3.12: `path` if it is given, or the one that the Makefile finds."""
    find = ["make", "--silent", "find-newest-python"]
    python = path or subprocess.run(find, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    if not python:
        raise FileNotFoundError("Tunix needs Python 3.12, and this machine has none; set its path with --python312")
    return python
