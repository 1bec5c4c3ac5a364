"""The lease on a run directory in a store: one process holds it, and one that has died loses it."""

import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.stores import FolderStore, no_fault
from train.config.errors import UserError
from train.run.lock import claim, locked
from train.storage import lease
from train.storage.paths import as_path

OTHER = {"host": "another", "pid": 1, "owner": "someone", "boot": "b", "started": "1", "number": 0}


@pytest.fixture
def lock(store, monkeypatch):
    """The path of a lock whose times are short."""
    monkeypatch.setattr(lease, "LEASE", 0.6)
    monkeypatch.setattr(lease, "RENEWAL", 0.05)
    monkeypatch.setattr(lease, "SETTLE", 0.05)
    return as_path("s3://bucket/run/.lock")


def write(lock, **fields):
    lock.write_text(json.dumps({**OTHER, **fields}))


def never(text):
    raise AssertionError(text)


def test_claimed_directory_is_taken(lock):
    assert claim(lock.parent)
    assert not claim(lock.parent)
    as_path("s3://bucket/other/config.yaml").write_text("")
    assert not claim(as_path("s3://bucket/other"))


def test_lock_is_renewed_and_deleted(lock):
    assert claim(lock.parent)
    with locked(lock.parent):
        first = json.loads(lock.read_bytes())["number"]
        time.sleep(0.3)
        assert json.loads(lock.read_bytes())["number"] > first
    assert not lock.exists()


def test_holder_that_lives_is_named(lock, capsys):
    write(lock)
    ended = threading.Event()

    def renew():
        number = 0
        while not ended.wait(0.1):
            number += 1
            write(lock, number=number)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(UserError, match=r"run is being written by another process .process 1 on another"):
            lease._take(lock)
    finally:
        ended.set()
        thread.join()
    assert "waiting up to" in capsys.readouterr().err


def test_holder_that_stands_still_loses_the_lock(lock):
    write(lock)
    began = time.monotonic()
    with lease.leased(lock, never):
        assert time.monotonic() - began >= lease.LEASE
        assert json.loads(lock.read_bytes())["owner"] == lease.OWNER["owner"]


def test_holder_of_this_machine_that_has_died_loses_it_at_once(lock, monkeypatch):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    monkeypatch.setattr(lease, "LEASE", 60.0)
    write(lock, **{**lease._me(), "pid": int(ended.stdout), "owner": "someone"})
    with lease.leased(lock, never):
        pass


def test_process_with_the_number_of_a_dead_one_is_another(lock, monkeypatch):
    monkeypatch.setattr(lease, "LEASE", 60.0)
    write(lock, **{**lease._me(), "started": "1", "owner": "someone"})
    with lease.leased(lock, never):
        pass


def test_second_of_two_that_take_over_has_it(lock, monkeypatch):
    write(lock)

    def also(seconds):
        if seconds == lease.SETTLE:
            write(lock, owner="a third")

    monkeypatch.setattr(lease.time, "sleep", also)
    with pytest.raises(UserError, match=r"is being written by another process"):
        lease._take(lock)


def test_process_whose_claim_comes_second_waits(lock, monkeypatch):
    def second(path):
        write(lock, number=1)
        return False

    def live(seconds):
        if seconds != lease.SETTLE:
            write(lock, number=2)

    monkeypatch.setattr(lease, "claim_lock", second)
    # Other threads sleep, too.
    monkeypatch.setattr(lease, "time", SimpleNamespace(sleep=live, monotonic=time.monotonic))
    with pytest.raises(UserError, match=r"is being written by another process .process 1 on another"):
        lease._take(lock)
    assert json.loads(lock.read_bytes())["owner"] == "someone"


def test_lock_that_is_gone_or_damaged_is_taken(lock):
    lock.write_bytes(b"{")
    with lease.leased(lock, never):
        pass


def test_process_whose_lock_was_taken_is_told(lock):
    told = []
    with lease.leased(lock, told.append):
        write(lock, host="thief")
        for _ in range(100):
            if told:
                break
            time.sleep(0.02)
    assert told == ["s3://bucket/run was taken over by process 1 on thief: nothing more is written to it"]
    assert json.loads(lock.read_bytes())["host"] == "thief"


def test_store_that_does_not_answer_is_waited_for(lock, monkeypatch):
    with lease.leased(lock, never):

        def fault(operation, path):
            raise OSError("no network")

        monkeypatch.setattr(FolderStore, "fault", staticmethod(fault))
        time.sleep(0.2)
        monkeypatch.setattr(FolderStore, "fault", staticmethod(no_fault))
    assert not lock.exists()
