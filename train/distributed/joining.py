"""The wait until all processes have joined: it ends after a limit, with the processes that came."""

import contextlib
import ctypes
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from train.config.errors import LostProcessError, warn

SHOWN = 16
"""Hosts that a message names."""
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
ESTABLISHED = "01"


@contextlib.contextmanager
def joining_within(seconds: float) -> Iterator[None]:
    """Ends this process with exit code 75 and the reason if the block, which joins the others, takes longer.

    JAX waits inside one call, and aborts without a reason, also when process 0 ends.
    """
    joined = threading.Event()
    began = time.monotonic()

    def end() -> None:
        os.write(2, f"error: --join-timeout: {_reason(time.monotonic() - began)}\n".encode())
        os._exit(LostProcessError.code)

    def end_late() -> None:
        if not joined.wait(seconds):
            end()

    thread = threading.Thread(target=end_late, name="joining", daemon=True)
    with before_abort(end):
        thread.start()
        try:
            yield
        finally:
            joined.set()
            thread.join()


@contextlib.contextmanager
def before_abort(end: Callable[[], None]) -> Iterator[None]:
    """Calls a function where JAX aborts this process inside the block; if it returns, the process aborts.

    JAX aborts in a thread of C++, with no hook that works; a handler of Python would run in the main thread, too late.
    Where the system gives Python no such handler, a warning says so, and the process aborts with JAX's own message.
    """

    def handle(number: int) -> None:
        end()
        set_handler(number, before)

    try:
        set_handler = _signal_of_c()
        called_by_c = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    except (OSError, TypeError, AttributeError, MemoryError) as error:
        warn(f"this system allows no signal handler in C ({error}), so an abort of JAX does not name the lost process")
        yield
        return
    before = set_handler(signal.SIGABRT, ctypes.cast(called_by_c, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGABRT, before)


def _signal_of_c() -> Callable[[int, Any], Any]:
    """Returns `signal` of the C library; raises what ctypes raises where there is none."""
    function = ctypes.CDLL(None).signal
    function.argtypes = (ctypes.c_int, ctypes.c_void_p)
    function.restype = ctypes.c_void_p
    return function


def _reason(seconds: float) -> str:
    from jax._src.distributed import global_state

    after = f"after {seconds:.0f} s"
    advice = "start all processes at about the same time, or raise the limit"
    address = global_state.coordinator_address
    count = global_state.num_processes
    if address is None or count is None:
        return f"the environment has not named the other processes {after}; {advice}"
    if global_state.process_id != 0:
        state = "waits for others" if coordinator_answers() else "cannot be reached"
        return f"process 0 at {address} {state} {after}; {advice}"
    hosts = connected_hosts(int(address.rpartition(":")[2]))
    if hosts is None:
        return f"some of {count} processes have not joined {address} {after}; {advice}"
    names = sorted(set(hosts))
    listed = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more hosts" if len(names) > SHOWN else "")
    return f"{len(hosts)} of {count} processes have joined {address} {after}, from {listed}; {advice}"


def connected_hosts(port: int) -> list[str] | None:
    """Lists the addresses of the connections to a port of this host; None where the system has no table of them.

    A Linux without IPv6 has one table of the two, macOS none.
    """
    hosts = []
    tables = [Path(table) for table in TABLES if os.access(table, os.R_OK)]
    if not tables:
        return None
    for table in tables:
        for line in table.read_text().splitlines()[1:]:
            _, local, remote, state, *_ = line.split()
            if state == ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                hosts.append(_host(remote.rpartition(":")[0]))
    return hosts


def _host(text: str) -> str:
    """Reads an address as the kernel writes it: words of four bytes, each in the order of this machine."""
    words = (int(text[start : start + 8], 16) for start in range(0, len(text), 8))
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)


def coordinator_answers() -> bool:
    """Whether the address of process 0 takes connections."""
    from jax._src.distributed import global_state

    host, _, port = str(global_state.coordinator_address).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True
