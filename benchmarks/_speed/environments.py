"""Environments apart from that of this project: Tunix on its own JAX, and transformers with PyTorch."""

import os
import pathlib
import shutil
import subprocess
import sys

REQUIREMENTS = {
    "tunix": ("google-tunix==0.1.7", "jax==0.12.0.1", "flax==0.12.12"),
    "transformers": ("torch==2.13.0", "transformers==5.23.0", "numpy==2.4.6"),
}
# Folders below the directory that the command is given.
FOLDERS = {"tunix": "tunix", "transformers": "torch"}


def interpreter(directory: pathlib.Path, name: str) -> pathlib.Path:
    """The interpreter of an environment, which need not exist."""
    return directory.absolute() / FOLDERS[name] / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def why_not(directory: pathlib.Path | None, name: str) -> str | None:
    """Why an environment cannot be used, or None if it can."""
    if directory is None:
        return "no --envs was given; make them with --make-envs DIR"
    python = interpreter(directory, name)
    return None if python.exists() else f"{python} is missing; make it with --make-envs {directory}"


def make(directory: pathlib.Path, *, python312: str | None, torch_index: str | None) -> None:
    """Makes what is missing in the directory.

    Args:
      directory: of the environments.
      python312: a Python 3.12, which Tunix's dependencies need; None looks for one.
      torch_index: package index for PyTorch in place of PyPI, whose build for Linux has CUDA in it; the processor's own
        is at `https://download.pytorch.org/whl/cpu`.

    Raises:
      FileNotFoundError: if there is no Python 3.12.
    """
    pythons = {"tunix": _python312(python312), "transformers": sys.executable}
    for name, (first, *others) in REQUIREMENTS.items():
        python = interpreter(directory, name)
        if python.exists():
            continue
        subprocess.run([pythons[name], "-m", "venv", str(python.parents[1])], check=True)
        index = ("--index-url", torch_index) if name == "transformers" and torch_index else ()
        _pip(python, *index, first)
        _pip(python, *others)


def _python312(given: str | None) -> str:
    if given is not None:
        return given
    installed = sorted(pathlib.Path.home().glob(".pyenv/versions/3.12*/bin/python"))
    for candidate in (sys.executable, shutil.which("python3.12"), *map(str, installed)):
        if candidate is not None and _is_python312(candidate):
            return candidate
    raise FileNotFoundError("Tunix needs Python 3.12, and there is no python3.12 here; say where with --python312")


def _is_python312(python: str) -> bool:
    """Whether it starts and is one: a shim of pyenv is found on PATH also where its version is not active."""
    check = "import sys; sys.exit(sys.version_info[:2] != (3, 12))"
    return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0


def _pip(python: pathlib.Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)
