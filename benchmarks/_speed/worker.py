"""A process that runs one contender: `python -m benchmarks._speed.worker kljax|tunix|transformers`.

Requests and replies are lines of JSON, as those of `benchmarks._worker`. Requests have `do`: "load" with `work`,
`directory` and `threads`; then "score" with a `path` to save to, "run" or "peak" with a `part`, "learn" with a `path`,
"versions".
"""

import dataclasses
import importlib
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks._speed import clock, memory
from benchmarks._speed import work as works
from benchmarks._worker import serve


@dataclasses.dataclass
class Worker:
    """Answers requests about one contender.

    Attributes:
      name: of the contender.
    """

    name: str
    side: Any = None
    work: works.Work = dataclasses.field(default_factory=works.Work)

    def answer(self, request: Mapping[str, Any]) -> Any:
        """The result of a request, as JSON has it."""
        match request["do"]:
            case "load":
                self.work = works.from_json(request["work"])
                module = importlib.import_module(f"benchmarks._speed.{self.name}_side")
                if request["threads"] and self.name == "transformers":
                    module.torch.set_num_threads(request["threads"])
                self.side = module.Side(self.work, pathlib.Path(request["directory"]))
                return None
            case "versions":
                return self.side.versions()
            case "score":
                np.save(request["path"], self.side.score())
                return None
            case "learn":
                self.side.learn(pathlib.Path(request["path"]))
                return None
            case "run":
                return self._run(request["part"], clock.Laps())
            case "peak":
                laps = memory.Laps()
                self._run(request["part"], laps)
                return laps.peaks
        raise ValueError(f"do: got {request['do']!r}, expected load, versions, score, learn, run or peak")

    def _run(self, part: str, laps: Any) -> Any:
        """What one run took, by its parts."""
        if part == "step":
            self.side.step(laps)
            return laps.seconds
        with laps.part("rollout"):
            tokens = self.side.rollout()
        self._check(tokens)
        return laps.seconds

    def _check(self, tokens: np.ndarray) -> None:
        expected = (self.work.rows, self.work.completion_length)
        if tokens.shape != expected or not ((tokens >= 0) & (tokens < self.work.vocab)).all():
            raise ValueError(f"tokens: got {tokens.shape}, expected {expected} ids of the vocabulary")


def main() -> None:
    # What libraries print must not come between the replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(Worker(sys.argv[1]), sys.stdin, replies)
    # The loop of Tunix's learner waits for a batch that will not come, and Python would wait for its threads.
    os._exit(0)


if __name__ == "__main__":
    main()
