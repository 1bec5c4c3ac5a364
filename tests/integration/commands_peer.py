"""One of several processes that join once and run commands in turn: `train CONFIG -- train.eval RUN FLAGS`.

Each command has a process of its own elsewhere; imports and the start of JAX take most of the time of a short one.
"""

import argparse
import importlib
import itertools
import sys
from unittest import mock

from tests.run_programs import shared_by_runs
from train.distributed import peers
from train.process import console
from train.process.interrupt import exit_with
from train.run import run

NEXT = "--"
FLAGS = 6
"""Words that name the coordinator, the process and the number of processes."""


def main(arguments: list[str]) -> int:
    """Runs the commands until one fails; returns its exit code, or 0."""
    words, flags = arguments[:-FLAGS], arguments[-FLAGS:]
    joined = []

    def join_once(options: argparse.Namespace) -> None:
        if not joined:
            join(options)
            joined.append(options)

    join, leave = console.join_processes, peers.stop
    with (
        shared_by_runs(),
        mock.patch.object(console, "join_processes", join_once),
        mock.patch.object(peers, "stop", return_value=None),
        # The picture is that of one process.
        mock.patch.object(run, "write_curves"),
    ):
        for is_next, command in itertools.groupby(words, NEXT.__eq__):
            module, *options = command
            if is_next:
                continue
            entry = importlib.import_module("train.__main__" if module == "train" else module)
            code = entry.main([*options, *flags])
            if code:
                return code
    leave()
    return 0


if __name__ == "__main__":
    exit_with(main(sys.argv[1:]))
