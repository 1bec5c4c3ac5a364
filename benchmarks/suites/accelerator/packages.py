"""The wheels that this environment lacks, from the lock file of the checkout."""

import importlib.metadata
import importlib.util
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.harness.process import ROOT

# What the tests need beside the trainer.
TESTS = ("hypothesis", "pytest")
# The machine has its own, with the libraries of its devices.
GIVEN = ("jax", "jaxlib", "numpy")
Package = Mapping[str, Any]


def missing() -> list[str]:
    """Lists packages as lines of a requirements file: those of the trainer and its tests, and what they need.

    A package of the project that is older than it asks for is listed as well; of the others, those that are not
    installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["train"]]
    locked = _by_name(tomllib.loads((ROOT / "uv.lock").read_text())["package"])
    old = {name for name, least in map(_parse, wanted) if name not in GIVEN and _is_older(name, least)}
    lines = [f"{name}=={locked[name]['version']}" for name in sorted(old)]
    lines += [f"{name}=={locked[name]['version']}" for name in sorted(_closure(locked, map(_name, wanted)) - old)]
    lines += [line for line in wanted if _name(line) in GIVEN and _is_older(*_parse(line))]
    return sorted(set(lines), key=_name)


def _closure(locked: Mapping[str, Package], roots: Iterable[str]) -> set[str]:
    """Returns the packages that are not installed among the roots, the tests' and what these need."""
    found, ahead = set[str](), [*roots, *TESTS]
    while ahead:
        name = ahead.pop()
        if name in found or name in GIVEN or name not in locked or _installed(name) is not None:
            continue
        found.add(name)
        ahead += [one["name"] for one in locked[name].get("dependencies", []) if _applies(one.get("marker"))]
    return found


def _by_name(packages: Iterable[Package]) -> dict[str, Package]:
    """Returns the locked package of each name that is meant for this Python."""
    found: dict[str, Package] = {}
    for package in packages:
        markers = package.get("resolution-markers")
        if markers is None or any(_applies(marker) for marker in markers):
            found[package["name"]] = package
    return found


def _applies(marker: str | None) -> bool:
    """Tells whether a marker of the lock file holds here; where `packaging` is missing, every one is taken to."""
    if marker is None or importlib.util.find_spec("packaging") is None:
        return True
    from packaging.markers import Marker

    return Marker(marker).evaluate()


def _name(requirement: str) -> str:
    return re.split(r"[<>=\[;! ]", requirement, maxsplit=1)[0]


def _parse(requirement: str) -> tuple[str, str]:
    """Returns the name of a requirement, and the version that it asks for at least."""
    return _name(requirement), requirement.partition(">=")[2].partition(";")[0]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_older(name: str, least: str) -> bool:
    """Tells whether a package is missing or below a version."""
    installed = _installed(name)
    return installed is None or _numbers(installed) < _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])
