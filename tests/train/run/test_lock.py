"""One process writes a run: of two that start at one moment each gets a name, and of two that continue one goes on."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests import tiny
from train.config.errors import UserError
from train.run.directory import open_run, start_run
from train.run.lock import claim, locked
from train.run.output_path import check_output

HOLD = """
import sys, time
from pathlib import Path
from train.run.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(100)
"""


def config_of(output, *overrides):
    return tiny.config_of(f"output={output}", "name=first", *overrides)


def test_simultaneous_starts_get_different_names(tmp_path):
    config, names, barrier = config_of(tmp_path / "runs"), [], threading.Barrier(8)

    def start():
        barrier.wait()
        names.append(start_run(config).root.name)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == ["first", *(f"first-{number}" for number in range(2, 9))]


def test_second_process_waits_for_the_first_to_die(tmp_path):
    root = start_run(config_of(tmp_path)).root
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(UserError, match=rf"^{root} is being written by another process; wait"),
            open_run(config_of(tmp_path), resume=True),
        ):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with open_run(config_of(tmp_path), resume=True) as directory:
        assert directory.root == root


def test_a_name_is_claimed_once(tmp_path):
    assert claim(tmp_path / "a" / "run")
    assert not claim(tmp_path / "a" / "run")
    (tmp_path / "file").write_text("")
    assert not claim(tmp_path / "file")


def test_missing_directory_is_not_made(tmp_path):
    with locked(tmp_path / "run"):
        assert not list(tmp_path.iterdir())


def test_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with locked(tmp_path):
        assert "warning: this system has no file locks" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", fail)
    with locked(tmp_path):
        assert f"warning: the file system of {tmp_path} has no locks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("a[x]", r"^output: got .*a\[x\]/first, in which orbax takes \[ for a pattern"),
        ("a\\b", r"in which orbax takes \\ for a pattern"),
        ("file/below", r"^output: cannot create .*: .*/file is not a directory$"),
    ],
)
def test_path_unusable_for_a_run_is_named(tmp_path, output, message):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=message):
        check_output(config_of(tmp_path / output))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_name_beyond_the_limit_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pathconf", lambda *_: 143)
    with pytest.raises(UserError, match=r"^output: cannot create .*: a name of 200 bytes, expected at most 143$"):
        check_output(config_of(tmp_path / ("x" * 200)))


def test_unwritable_directory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match=rf"^output: cannot create .*: {tmp_path} is not writable$"):
        check_output(config_of(tmp_path / "runs"))


def test_writable_paths_pass(tmp_path):
    check_output(config_of(tmp_path))
    check_output(config_of(tmp_path / "neu €" / "runs"))
    assert not list(tmp_path.iterdir())
