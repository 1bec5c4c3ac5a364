"""The wheels that this environment lacks, from the lock file of the checkout."""

import importlib.metadata
import importlib.util
import re
import tomllib

from benchmarks.harness.process import ROOT

# What the tests need beside the trainer.
TESTS = ("hypothesis", "pytest")
# The machine has its own, with the libraries of its devices.
GIVEN = ("jax", "jaxlib", "numpy")


def missing() -> list[str]:
    """Lists packages as lines of a requirements file: for the trainer and its tests, with their dependencies.

    A package of the project is listed if it is missing or older than required, any other one if it is missing.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["train"]]
    required = {re.split(r"[<>=\[;! ]", line, maxsplit=1)[0]: line for line in wanted}
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    # The entry of each package that is meant for this Python.
    locked = {
        package["name"]: package
        for package in packages
        if any(map(_applies, package.get("resolution-markers", [None])))
    }
    lines, ahead = dict[str, str](), [*required, *TESTS]
    while ahead:
        name = ahead.pop()
        installed, least = _installed(name), required.get(name, "").partition(">=")[2].partition(";")[0]
        if name in lines or (installed is not None and installed >= _numbers(least)):
            continue
        if name in GIVEN:
            lines |= {name: required[name]} if name in required else {}
        elif name in locked:
            lines[name] = f"{name}=={locked[name]['version']}"
            needed = locked[name].get("dependencies", []) if installed is None else []
            ahead += [dependency["name"] for dependency in needed if _applies(dependency.get("marker"))]
    return [lines[name] for name in sorted(lines)]


def _applies(marker: str | None) -> bool:
    """Tells whether a marker of the lock file holds here; where `packaging` is missing, all of them are taken to."""
    if marker is None or importlib.util.find_spec("packaging") is None:
        return True
    from packaging.markers import Marker

    return Marker(marker).evaluate()


def _installed(name: str) -> tuple[int, ...] | None:
    try:
        return _numbers(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])
