"""Programs are kept for later starts, apart for each compiler and CPU, and no trouble with the directory ends a run."""

import errno
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests import peers, programs
from train.config.installation import user_caches
from train.distributed import compile_cache
from train.distributed.compile_cache import fingerprint, start_compile_cache, write_whole_files

ENV = {name: value for name, value in os.environ.items() if name != compile_cache.VARIABLE}


def start(field: object, *, processes: int = 1, **env: str) -> list[tuple[str, int, int]]:
    """Starts processes; returns the line of each, and the programs that it read and compiled."""
    ended = peers.run("tests.train.distributed.caching", field, processes=processes, devices=2, env={**ENV, **env})
    told = []
    for code, out, err in ended:
        assert (code, [line for line in err.splitlines() if "arning" in line]) == (0, []), err
        line, counts = [line for line in out.splitlines() if "[Gloo]" not in line]
        told.append((line, *map(int, counts.split())))
    return told


def kept(root: pathlib.Path) -> list[pathlib.Path]:
    return sorted(root.glob("jax-*/*-cache"))


def test_second_start_compiles_nothing(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    root = user_caches(environment) / "compiled"
    ((line, read, compiled),) = start("true", **environment)
    assert (line, read) == (f"compile cache: {root / fingerprint()}, 0 programs", 0)
    assert len(kept(root)) == compiled > 0
    assert (root / fingerprint()).stat().st_mode & 0o777 == 0o700
    # A program that a full disk has cut is compiled again, and written again.
    whole = kept(root)[0].read_bytes()
    kept(root)[0].write_bytes(whole[:100])
    ((line, *counts),) = start("true", **environment)
    assert line == f"compile cache: {root / fingerprint()}, {compiled} programs"
    assert counts == [compiled - 1, 1]
    assert start("true", **environment) == [(line, compiled, 0)]
    assert sorted(file.name for file in (root / fingerprint()).iterdir()) == [file.name for file in kept(root)]
    # The variable of JAX goes before the default, and the field before the variable.
    variable = {**environment, compile_cache.VARIABLE: ""}
    assert [line for line, *_ in start("true", **variable)] == [f"compile cache: off, as {compile_cache.VARIABLE} says"]
    assert start(root, **variable) == [(line, compiled, 0)]
    assert start("false", **environment)[0][:2] == ("compile cache: off", 0)


@pytest.mark.slow
def test_two_processes_share_a_directory(tmp_path):
    """On CPUs the key of a program has the number of the process, so that the leader alone reads what it wrote."""
    first = start(tmp_path, processes=2)
    assert [read for _, read, _ in first] == [0, 0]
    second = start(tmp_path, processes=2)
    assert second[0] == (f"compile cache: {tmp_path / fingerprint()}, {first[0][2]} programs", first[0][2], 0)
    assert {line for line, *_ in second} == {second[0][0]}


@pytest.mark.parametrize("others", [[["other CPU", True]], [[fingerprint(), False]]])
def test_programs_that_some_processes_miss_are_not_kept(others, monkeypatch, tmp_path):
    """A process that compiles may wait for the others, which would not, since they read the program."""
    monkeypatch.setattr(compile_cache, "exchange_json", lambda label, value: [value, *others])
    with changed_settings(monkeypatch):
        line = start_compile_cache(str(tmp_path))
    assert re.search(r"off, because of .*: some processes (see another one|have another CPU); set compile_cache", line)
    assert not list(tmp_path.glob("*/*"))


def changed_settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the settings of JAX back at the end of a block, in which the environment says nothing."""
    monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
    return programs.kept_in(pathlib.Path(os.devnull))


@pytest.mark.parametrize("kind", ["a file", "no room", "read-only"])
def test_unusable_directory_is_a_line(kind, monkeypatch, tmp_path):
    if kind == "a file":
        (tmp_path / "root").write_text("")
    elif kind == "no room":
        monkeypatch.setattr(compile_cache, "FREE_BYTES", 2**60)
    else:
        # Root may write anywhere, so the system's answer is given here.
        def touch(self: pathlib.Path) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(pathlib.Path, "touch", touch)
    with changed_settings(monkeypatch):
        line = start_compile_cache(str(tmp_path / "root"))
        assert jax.config.jax_compilation_cache_dir is None
    reason = {"a file": "Not a directory", "no room": "less than .* MiB are free", "read-only": "Read-only file system"}
    assert re.fullmatch(rf"compile cache: off, because of {tmp_path}/root/jax-\S+: {reason[kind]}", line)


def test_programs_of_a_read_only_directory_are_read(monkeypatch, tmp_path):
    path = tmp_path / fingerprint()
    path.mkdir()
    (path / "some-cache").write_bytes(b"")
    monkeypatch.setattr(compile_cache, "FREE_BYTES", 2**60)
    with changed_settings(monkeypatch):
        assert start_compile_cache(str(tmp_path)) == f"compile cache: {path}, 1 programs, read-only"
        jax.jit(lambda x: x * 3.25)(jnp.ones(3)).block_until_ready()
        assert jax.config.values["jax_persistent_cache_enable_xla_caches"] == ""
    assert [file.name for file in path.iterdir()] == ["some-cache"]


def test_disk_that_fills_up_is_one_warning(monkeypatch, capsys, tmp_path):
    write_whole_files()

    def full(self: pathlib.Path, target: pathlib.Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with changed_settings(monkeypatch):
        start_compile_cache(str(tmp_path))
        monkeypatch.setattr(pathlib.Path, "replace", full)
        for number in range(3):
            assert float(jax.jit(lambda x, n=number: x + n + 0.125)(1.0)) == number + 1.125
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.endswith("because No space left on device")
    assert not list((tmp_path / fingerprint()).iterdir())


def test_programs_unread_for_longest_are_deleted(monkeypatch, tmp_path):
    for age, name in enumerate(["new", "old", "oldest"]):
        file = tmp_path / f"jax-{name}" / "a-cache"
        file.parent.mkdir()
        file.write_bytes(b"x" * 100)
        os.utime(file, (10_000 - age, 5_000))
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 250)
    with changed_settings(monkeypatch):
        start_compile_cache(str(tmp_path))
    assert [file.parent.name for file in kept(tmp_path)] == ["jax-new", "jax-old"]


def test_other_cpus_and_releases_have_other_directories(monkeypatch):
    own = fingerprint()
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert fingerprint() != own
    monkeypatch.undo()
    cpus = iter(["flags\t\t: sse avx2\nprocessor\t: 0\n", "flags\t\t: sse\n", "flags\t\t: sse avx2\nprocessor\t: 1\n"])
    monkeypatch.setattr(pathlib.Path, "read_text", lambda self: next(cpus))
    first, second, third = (fingerprint() for _ in range(3))
    assert first == third != second
