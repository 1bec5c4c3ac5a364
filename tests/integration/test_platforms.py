"""The supported systems: each has wheels in the lock file, make refuses an unfit Python, and tests need no /proc."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging import tags, utils
from packaging.markers import Marker

from tests import processes

ROOT = Path(__file__).parents[2]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
EXTRAS, GROUPS = ("train", "datasets"), ("docs", "dev")
ACCELERATORS = {"cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin", "tpu": "libtpu"}
# The oldest releases that have all wheels; README names them.
GLIBC_MINOR, MACOS = 28, (12, 0)
SYSTEMS = {"linux x86_64": "Linux", "linux aarch64": "Linux", "darwin arm64": "Darwin"}


def wheel_tags(system: str, python: tuple[int, int], glibc: int = GLIBC_MINOR) -> set[tags.Tag]:
    """Returns the tags of the wheels that an interpreter installs."""
    name, machine = system.split()
    if name == "darwin":
        platforms = list(tags.mac_platforms(MACOS, machine))
    else:
        platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, 4, -1)]
        platforms += [f"manylinux{year}_{machine}" for year in (2014, 2010, 1)]
    interpreter = f"cp{python[0]}{python[1]}"
    return {*tags.cpython_tags(python, platforms=platforms), *tags.compatible_tags(python, interpreter, platforms)}


def locked_packages(system: str, python: tuple[int, int], extras: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the packages that the library, some extras and `GROUPS` need, as `uv sync` finds them."""
    name, machine = system.split()
    version = f"{python[0]}.{python[1]}"
    environment = {"sys_platform": name, "platform_system": SYSTEMS[system], "platform_machine": machine}
    environment |= {"python_version": version, "python_full_version": f"{version}.9"}
    # The lock file's own name of an extra that another one excludes.
    environment |= {"extra": f"extra-5-kljax-{extras[-1]}"}
    (root,) = (package for package in LOCK["package"] if package["source"] == {"editable": "."})
    entries = [*root["dependencies"], *(entry for group in GROUPS for entry in root["dev-dependencies"][group])]
    entries += [entry for extra in extras for entry in root["optional-dependencies"][extra]]
    seen = set()
    while entries:
        entry = entries.pop()
        key = (entry["name"], *entry.get("extra", []))
        if key in seen or not Marker(entry.get("marker", "python_version > '3'")).evaluate(environment):
            continue
        seen.add(key)
        named = (package for package in LOCK["package"] if package["name"] == entry["name"])
        (package,) = (package for package in named if entry.get("version", package["version"]) == package["version"])
        yield package
        entries += package.get("dependencies", [])
        entries += [more for extra in entry.get("extra", []) for more in package["optional-dependencies"][extra]]


def lacking(packages: Iterator[dict[str, Any]], accepted: set[tags.Tag]) -> list[str]:
    """Returns the names of the packages without a wheel of the accepted tags."""

    def is_accepted(wheel: dict[str, Any]) -> bool:
        return bool(utils.parse_wheel_filename(wheel["url"].rpartition("/")[2].replace("%2B", "+"))[3] & accepted)

    return sorted(package["name"] for package in packages if not any(map(is_accepted, package.get("wheels", []))))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", [(3, 11), (3, 12), (3, 13)], ids="{0[0]}.{0[1]}".format)
def test_every_locked_package_has_a_wheel(system, python):
    packages = list(locked_packages(system, python, EXTRAS))
    assert {"jaxlib", "orbax-checkpoint", "sphinx", "mypy", "antlr4-python3-runtime"} <= {p["name"] for p in packages}
    assert lacking(iter(packages), wheel_tags(system, python)) == []


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("python", [(3, 11), (3, 12), (3, 13)], ids="{0[0]}.{0[1]}".format)
def test_every_package_for_an_accelerator_has_a_wheel(accelerator, python):
    packages = list(locked_packages("linux x86_64", python, (*EXTRAS, accelerator)))
    assert ACCELERATORS[accelerator] in {package["name"] for package in packages}
    # libtpu needs a newer Linux than the rest.
    assert lacking(iter(packages), wheel_tags("linux x86_64", python, glibc=31)) == []


def test_a_package_without_a_wheel_is_found():
    for system, missing in (("darwin arm64", ["jaxlib"]), ("linux x86_64", [])):
        wheels = [{"url": "https://a/jaxlib-1-cp311-cp311-manylinux_2_27_x86_64.whl"}]
        package = {"name": "jaxlib", "wheels": wheels}
        assert lacking(iter([package]), wheel_tags(system, (3, 11))) == missing


# What GNU make 3.81, which macOS has, does not know; from the NEWS of its later releases.
NEWER_THAN_3_81 = {
    "assignments": r"^[^\t#]*?(!=|::=)",
    "a define with an operator": r"^define [\w-]+ *[:+?!]?=",
    "directives": r"^(undefine|private|load|-load)\b",
    "special targets": r"\.(ONESHELL|RECIPEPREFIX|SHELLFLAGS|EXTRA_PREREQS|NOTINTERMEDIATE|WAIT)\b",
    "functions": r"\$[({](file|guile|let|intcmp) ",
    "grouped targets": r"&:",
    "options": r"--(output-sync|trace|eval|shuffle)\b",
}


MAKEFILES = ("Makefile", ".ci/more.mk")


@pytest.mark.parametrize("construct", NEWER_THAN_3_81)
@pytest.mark.parametrize("makefile", MAKEFILES)
def test_makefile_runs_with_make_3_81(makefile, construct):
    assert not re.findall(NEWER_THAN_3_81[construct], (ROOT / makefile).read_text(), re.M)


def test_make_without_a_target_prints_the_targets():
    """Each target that a user calls has a text, and no other is printed; those of a contributor come first."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    alone, helped = (
        subprocess.run(["make", *target], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        for target in ([], ["help"])
    )
    assert (alone.stderr, alone.stdout) == ("", helped.stdout)
    for text, makefile in zip(alone.stdout.split("\n\n"), MAKEFILES, strict=True):
        (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / makefile).read_text(), re.M)
        printed = [re.fullmatch(r"([a-z-]+) +(\S.*)", line) for line in text.splitlines()]
        assert {line[1] for line in printed} == set(phony.split()) - {"find-newest-python"}
    assert re.search("^train +the main job", alone.stdout, re.M)


OF_TESTS = ("test", "test-all", "test-isa", "test-library", "test-house")


@pytest.mark.parametrize("target", OF_TESTS)
def test_files_in_args_replace_tests_of_a_target(target):
    """Options are added to the tests of the target."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}

    def paths(arguments: str) -> list[str]:
        command = ["make", "-n", target, f"ARGS={arguments}"]
        text = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
        words = text.partition("-m pytest")[2].replace("\\\n", " ").split()
        return [word for word in words if word.startswith(("tests/", "kljax"))]

    assert paths("tests/kljax/test_kl.py::test_a -n 0") == ["tests/kljax/test_kl.py::test_a"]
    assert paths("tests/kljax tests/train -k kl") == ["tests/kljax", "tests/train"]
    assert paths("-k kl -p tests.cpu_times") == paths("")


@pytest.mark.parametrize(
    "module", ["train", "train.eval", "train.export", "train.import", "train.report", "train.plan", "train.serve"]
)
def test_python_without_packages_names_the_command(module):
    command = [sys.executable, "-S", "-m", module, "x"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"error: .* has no package pydantic, which the trainer needs; run \.venv/bin/python -m .*", line
    )


# Stands for Python: tells its version, has ensurepip or not, and writes down how it was called last.
PYTHON = """#!/bin/sh
case "$2" in
  *version_info*) echo {version} ;;
  *ensurepip*) exit {without} ;;
  *) echo "$*" > called; exit 1 ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    """Runs make beside nothing but a Python of a version, or none; returns what it says, and the call of Python."""
    for name in (*MAKEFILES, "pyproject.toml", "uv.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    def run(*arguments: str, name: str = "python3", version: str = "", without: int = 0) -> tuple[str, str]:
        python = tmp_path / "bin" / name
        python.parent.mkdir(exist_ok=True)
        python.write_text(PYTHON.format(version=version, without=without) if version else "#!/bin/sh\nexit 127\n")
        python.chmod(0o755)
        env = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        env = {key: value for key, value in env.items() if not key.startswith(("MAKE", "MFLAGS", "PYTHON"))}
        command = ["make", "-s", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        called = tmp_path / "called"
        lines = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
        return "\n".join(lines), called.read_text().strip() if called.exists() else ""

    return run


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_supported_python_makes_the_environment(make, version):
    assert make("lint", version=version) == ("", "-m venv .venv")


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.10", "3.14"])
def test_an_unsupported_python_is_refused_in_one_line(make, version):
    expected = "expected Python 3.11 or 3.12 or 3.13, such as make PYTHON=python3.12"
    assert make("train", version=version) == (
        f"error: PYTHON: got 'python3', which is Python {version}; {expected}",
        "",
    )


def test_a_python_without_ensurepip_names_its_package(make):
    """As Debian's python3 is without the package python3-venv."""
    line, called = make("test", version="3.11", without=1)
    assert line.startswith("error: PYTHON: got 'python3', which has no venv with ensurepip (")
    assert "apt install python3.11-venv" in line
    assert (line.count("\n"), called) == (0, "")


def test_python_failing_to_start_is_refused_briefly(make):
    line, called = make("lint")
    assert line.startswith("error: PYTHON: got 'python3', which does not start; expected Python 3.11 or")
    assert (line.count("\n"), called) == (0, "")


def test_the_newest_jax_needs_python_3_12(make):
    line, _ = make("test-newest", "NEWEST_PYTHON=python", name="python", version="3.11")
    expected = "expected Python 3.12 or 3.13, such as make NEWEST_PYTHON=python3.12"
    assert line == f"error: NEWEST_PYTHON: got 'python', which is Python 3.11; {expected}"
    assert "got '', which does not start" in make("test-newest", "NEWEST_PYTHON=")[0]


WITHOUT_PROC = pytest.param(False, marks=pytest.mark.skipif(not shutil.which("pgrep"), reason="pgrep and ps"))
WITH_PROC = pytest.param(True, marks=pytest.mark.skipif(not processes.PROC.exists(), reason="Linux has /proc"))


@pytest.mark.parametrize("proc", [WITH_PROC, WITHOUT_PROC])
def test_a_process_is_watched_with_and_without_proc(monkeypatch, tmp_path, proc):
    if not proc:
        monkeypatch.setattr(processes, "PROC", tmp_path / "absent")
    # Two commands, so that the shell starts another process.
    command = ["sh", "-c", f"{sys.executable} -c 'import time; print(1, flush=True); time.sleep(60)'; true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as shell:
        assert shell.stdout.readline() == b"1\n"
        child = processes.child_of(shell.pid)
        assert processes.child_of(child) is None
        os.kill(child, signal.SIGSTOP)
        while processes.state_of(child) != "T":
            assert processes.state_of(child) not in "ZX"
        os.kill(child, signal.SIGKILL)
        shell.wait(60)
        assert processes.state_of(child) == "X"
