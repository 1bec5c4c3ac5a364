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
    """Lists packages as lines of a requirements file: those of the trainer and its tests, and what they need.

    A package of the project that is older than it asks for is listed as well; of the others, those that are not
    installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["train"]]
    asked = {re.split(r"[<>=\[;! ]", line, maxsplit=1)[0]: line for line in wanted}
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    # The entry of each package that is meant for this Python.
    locked = {one["name"]: one for one in packages if any(map(_applies, one.get("resolution-markers", [None])))}
    found, ahead = dict[str, str](), [*asked, *TESTS]
    while ahead:
        name = ahead.pop()
        installed, least = _installed(name), asked.get(name, "").partition(">=")[2].partition(";")[0]
        if name in found or (installed is not None and installed >= _numbers(least)):
            continue
        if name in GIVEN:
            found |= {name: asked[name]} if name in asked else {}
        elif name in locked:
            found[name] = f"{name}=={locked[name]['version']}"
            needed = locked[name].get("dependencies", []) if installed is None else []
            ahead += [one["name"] for one in needed if _applies(one.get("marker"))]
    return [found[name] for name in sorted(found)]


def _applies(marker: str | None) -> bool:
    """Tells whether a marker of the lock file holds here; where `packaging` is missing, every one is taken to."""
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
