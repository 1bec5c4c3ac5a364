"""An environment with PyTorch, apart from that of this project, and beside it the releases that are measured."""

import os
import pathlib
import subprocess
import sys

REQUIREMENTS = ("torch==2.13.0", "numpy==2.4.6", "packaging==25.0")
# Only single modules of these are imported, so nothing that they depend on is installed.
RELEASES = {"trl": "trl==1.16.0", "verl": "verl==0.9.1", "liger_kernel": "liger-kernel==0.8.5"}


def interpreter(directory: pathlib.Path) -> pathlib.Path:
    """The interpreter of an environment, which need not exist."""
    return directory.absolute() / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def releases(directory: pathlib.Path) -> pathlib.Path:
    """Where the releases are unpacked, each in a folder of its own."""
    return directory.absolute() / "releases"


def why_not(directory: pathlib.Path | None) -> str | None:
    """Why an environment cannot be used, or None if it can."""
    if directory is None:
        return "no --torch-env was given; make one with --make-torch-env DIR"
    needed = [interpreter(directory), *(releases(directory) / name for name in RELEASES)]
    missing = [path for path in needed if not path.exists()]
    return f"{missing[0]} is missing; make it with --make-torch-env {directory}" if missing else None


def make(directory: pathlib.Path, index: str | None) -> None:
    """Makes what is missing in the directory.

    Args:
      directory: of the environment and the releases.
      index: package index for PyTorch in place of PyPI, whose build for Linux has CUDA in it; the processor's own is at
        `https://download.pytorch.org/whl/cpu`.
    """
    python = interpreter(directory)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    torch, *others = REQUIREMENTS
    _pip(python, *(("--index-url", index) if index else ()), torch)
    _pip(python, *others)
    for name, requirement in RELEASES.items():
        target = releases(directory) / name
        if not target.exists():
            _pip(python, "--no-deps", "--target", str(target), requirement)


def _pip(python: pathlib.Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)
