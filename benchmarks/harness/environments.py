"""Virtual environments of contenders, apart from that of this project."""

import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence


class MissingError(RuntimeError):
    """A contender whose environment was not made: its row says so, and the command does not fail."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """An environment in a folder of the directory of `--OPTION`, which `--make-OPTION` makes.

    Attributes:
      installs: arguments of each call of `pip install`; releases: unpacked beside it, without their dependencies.
    """

    option: str
    folder: str
    installs: Sequence[Sequence[str]]
    releases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def make(self, directory: pathlib.Path, python: str = sys.executable) -> None:
        """Makes the environment if there is none, and installs what is missing."""
        interpreter_path = interpreter(directory / self.folder)
        if not interpreter_path.exists():
            subprocess.run([python, "-m", "venv", str(interpreter_path.parents[1])], check=True)
        unpacked = [
            ("--no-deps", "--target", str(path), self.releases[path.name])
            for path in self._releases(directory)
            if not path.exists()
        ]
        for arguments in (*self.installs, *unpacked):
            pip = (interpreter_path, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            subprocess.run([*pip, *arguments], check=True)

    def find(self, directory: pathlib.Path | None) -> pathlib.Path:
        """Returns the interpreter; raises `MissingError`, which says how to make what is missing."""
        if directory is None:
            raise MissingError(f"no --{self.option} was given; make it with --make-{self.option} DIR")
        for path in (python := interpreter(directory / self.folder), *self._releases(directory)):
            if not path.exists():
                raise MissingError(f"{path} is missing; make it with --make-{self.option} {directory}")
        return python

    def _releases(self, directory: pathlib.Path) -> list[pathlib.Path]:
        return [directory.absolute() / "releases" / name for name in self.releases]


def interpreter(venv: pathlib.Path) -> pathlib.Path:
    """Returns the path of an environment's interpreter, whether it exists or not."""
    return venv.absolute() / "bin/python"
