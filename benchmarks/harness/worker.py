"""A process that answers requests about a contender: `python -m benchmarks.harness.worker MODULE`.

Requests and replies are lines of JSON. The request `{"do": "load", ...}` calls `load` of the module, which returns the
contender; any other one calls its method of that name. A reply is `{"result": ...}` or `{"error": ...}`.
The environment of the process needs NumPy and the libraries of the contender, nothing else.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO


class Worker:
    """A contender of this process, which `load` makes from the keyword arguments of the request "load"."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self.load = load
        self.contender: Any = None

    def ask(self, *, do: str, **arguments: Any) -> Any:
        """Returns the result of a request as plain data."""
        if do == "load":
            self.contender = self.load(**arguments)
            return None
        known = [key for key in dir(self.contender) if key[0] != "_" and callable(getattr(self.contender, key))]
        if do not in known:
            raise ValueError(f"do: got {do!r}, expected load or one of {', '.join(known)}")
        return getattr(self.contender, do)(**arguments)


def one_line(error: Exception, limit: int) -> str:
    """Returns the type and the message of an error in one line of at most `limit` characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:limit]


def serve(worker: Worker, requests: TextIO, replies: TextIO) -> None:
    """Answers requests until their stream ends."""
    for line in requests:
        try:
            reply = {"result": worker.ask(**json.loads(line))}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": one_line(error, 500)}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    # The output of libraries goes to stderr, so that stdout holds replies alone.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(Worker(importlib.import_module(sys.argv[1]).load), sys.stdin, replies)
    # Threads of a contender may wait for ever, as the loop of Tunix's learner does.
    os._exit(0)
