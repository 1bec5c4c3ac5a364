"""A process that runs contenders: `python -m benchmarks._worker jax|torch`. Requests and replies are lines of JSON.

Requests have `do`: "load" with `inputs`, `options` and `releases`; then "time", "compare" or "peak" with a `name`, and
"versions". A reply is `{"result": ...}`, or `{"error": ...}` in a few words. PyTorch's process runs in an environment
without JAX and without kljax.
"""

import dataclasses
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from benchmarks import _measure
from benchmarks._inputs import QUICK, Inputs, Options, make_inputs


class Worker:
    """Answers requests about the contenders of one framework."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.contenders: Any = None
        self.options, self.releases = Options(), ""

    def answer(self, request: Mapping[str, Any]) -> Any:
        """The result of a request, as JSON has it."""
        match request["do"]:
            case "load":
                self.options, self.releases = Options.from_json(request["options"]), request["releases"]
                self.contenders = self._contenders(Inputs.load(pathlib.Path(request["inputs"])))
                return None
            case "versions":
                return self.contenders.versions()
            case "time":
                return _measure.timed(self.contenders, request["name"])
            case "compare":
                directory, baseline = pathlib.Path(request["directory"]), request["baseline"]
                return dataclasses.asdict(_measure.compare(self.contenders, request["name"], directory, baseline))
            case "peak":
                self.contenders.prepare(request["name"])
                return _measure.peak(self.contenders, request["name"], self._contenders(make_inputs(QUICK)))
        raise ValueError(f"do: got {request['do']!r}, expected load, versions, time, compare or peak")

    def _contenders(self, inputs: Inputs) -> Any:
        if self.framework == "jax":
            from benchmarks import _jax_contenders

            return _jax_contenders.Contenders(inputs, self.options)
        from benchmarks import _torch_contenders

        return _torch_contenders.Contenders(inputs, self.options, pathlib.Path(self.releases))


class Answering(Protocol):
    """What answers requests."""

    def answer(self, request: Mapping[str, Any]) -> Any:
        """The result of a request, as JSON has it."""


def serve(worker: Answering, requests: TextIO, replies: TextIO) -> None:
    """Answers until there are no more requests."""
    for line in requests:
        try:
            reply = {"result": worker.answer(json.loads(line))}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    # What libraries print must not come between the replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(Worker(sys.argv[1]), sys.stdin, replies)


if __name__ == "__main__":
    main()
