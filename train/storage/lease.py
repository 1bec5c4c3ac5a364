"""The lease on a run directory in a store, which has no locks that end with their process.

The object `.lock` names its holder and a number. It is created by a request that fails if it is there, and its holder
raises the number every few seconds. Whoever finds it watches it for the time of a lease: a number that stands still is
that of a process that has died, and is taken over. No clocks are compared. A holder that finds another name in it,
after a pause or a time without network, ends at once and writes nothing more.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from train.config.errors import Note, UserError, warn
from train.storage.paths import create_exclusively

LEASE = 60.0
"""Seconds for which a lock that nobody renews stays that of its holder."""
RENEWAL = 10.0
SETTLE = 2.0
"""Seconds after which a process that has taken a lock over looks whether another one has done so too."""
OWNER = {"host": socket.gethostname(), "pid": os.getpid(), "owner": secrets.token_hex(8)}
"""Names this process in a lock."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def _content(number: int) -> bytes:
    return json.dumps({**_me(), "number": number}).encode()


def _me() -> dict[str, Any]:
    # Numbers of processes are those of a container.
    boot = f"{_BOOT.read_text().strip()} {os.readlink(_NAMESPACE)}" if _BOOT.is_file() else ""
    return {**OWNER, "pid": os.getpid(), "boot": boot, "started": _started(os.getpid())}


def _started(pid: int) -> str:
    """Returns the time at which a process of this machine started, in its own unit; no text if it cannot be told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def claim_lock(lock: Path) -> bool:
    """Creates the lock of a new run, for this process; returns False if there is one.

    Raises:
      OSError: it cannot be written.
    """
    return create_exclusively(lock, _content(0))


@contextmanager
def leased(lock: Path, lost: Callable[[str], None]) -> Iterator[None]:
    """Holds a lock inside the block, and deletes it at its end.

    Args:
      lock: its path.
      lost: is called, in a thread, with a message once another process holds the lock.

    Raises:
      UserError: another process holds it.
      OSError: it cannot be read or written.
    """
    _take(lock)
    ended = threading.Event()

    def renew() -> None:
        number = 0
        while not ended.wait(RENEWAL):
            number += 1
            # Without the store nothing can be written either; saves say so.
            with suppress(OSError):
                holder = _read(lock)
                if holder is None or holder.get("owner") != OWNER["owner"]:
                    lost(f"{lock.parent} was taken over by {_described(holder)}: nothing more is written to it")
                    return
                lock.write_bytes(_content(number))

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            if (_read(lock) or {}).get("owner") == OWNER["owner"]:
                lock.unlink(missing_ok=True)


def _take(lock: Path) -> None:
    holder = _read(lock)
    # Some servers that speak as S3 ignore the condition, so a lock that is there is looked at first.
    if holder is None:
        if claim_lock(lock):
            return
        # Another process was first.
        holder = _read(lock)
    if holder is not None and holder.get("owner") == OWNER["owner"]:
        return
    if holder is not None and not _has_died(holder):
        _watch(lock, holder)
    lock.write_bytes(_content(0))
    time.sleep(SETTLE)
    now = _read(lock)
    if now is None or now.get("owner") != OWNER["owner"]:
        raise _held(lock, now)


def _watch(lock: Path, holder: dict[str, Any]) -> None:
    """Waits for the time of a lease; raises `UserError` as soon as the holder of a lock shows that it lives."""
    warn(Note(f"{lock.parent} was last written by {_described(holder)}; waiting up to {LEASE:g} s for a sign of it"))
    end = time.monotonic() + LEASE
    while time.monotonic() < end:
        time.sleep(min(1.0, LEASE / 10))
        now = _read(lock)
        if now is None:
            return
        if now != holder:
            raise _held(lock, now)


def _held(lock: Path, holder: dict[str, Any] | None) -> UserError:
    return UserError(
        f"{lock.parent} is being written by another process ({_described(holder)}); wait until it ends, or give this "
        "run another name"
    )


def _described(holder: dict[str, Any] | None) -> str:
    if not holder:
        return "a process that left no name"
    return f"process {holder.get('pid')} on {holder.get('host')}"


def _has_died(holder: dict[str, Any]) -> bool:
    """Whether a process was one of this machine, since it started, and is not there any more."""
    me = _me()
    if not me["boot"] or (holder.get("host"), holder.get("boot")) != (me["host"], me["boot"]):
        return False
    pid = holder.get("pid")
    return isinstance(pid, int) and _started(pid) != holder.get("started")


def _read(lock: Path) -> dict[str, Any] | None:
    """Reads a lock; None if there is none. One that is damaged has no name."""
    try:
        content = json.loads(lock.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
