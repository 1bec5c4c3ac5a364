"""The child's side of a worker process; imports neither JAX nor the rest of the trainer."""

import contextlib
import faulthandler
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

# A child that its parent could not kill ends by itself this long after its limit.
ORPHAN_SECONDS = 60.0


def serve(answer: Callable[[Any], Any], *, memory: int | None = None) -> None:
    """Answers questions until the parent closes the pipe, whose descriptor is the last argument of the command.

    Signals of a terminal or a scheduler go to all processes of a job. They do nothing here, because the parent decides
    when its children end; the processes that the code of the user starts hear them.

    Args:
      answer: maps a question to an answer, a JSON value; an exception of it ends the process.
      memory: limit of the address space in bytes; macOS refuses it, and the limits of time alone remain.
    """
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    os.register_at_fork(after_in_child=lambda: _restore(before))
    pipe: Connection = Connection(int(sys.argv[-1]))
    os.set_inheritable(pipe.fileno(), False)
    if memory is not None:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with open(os.devnull, "w") as nowhere:
        for request in _requests(pipe):
            faulthandler.dump_traceback_later(request["seconds"] + ORPHAN_SECONDS, exit=True, file=nowhere)
            # SIGPROF ends the process, also in the middle of a function of C.
            signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
            reply = answer(request["question"])
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(json.dumps(reply).encode())


def _ignore(*_: Any) -> None:
    """Does nothing for a signal. SIG_IGN would also hold in the programs that the process starts."""


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _requests(pipe: Connection) -> Iterator[Any]:
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            yield pickle.loads(pipe.recv_bytes())
