"""The requests that every contender answers. NumPy only, which every environment has."""

from typing import Any

import numpy as np

from benchmarks.harness.measure import Clock, Memory, Seconds
from benchmarks.suites.model.problem import Work


class ModelContender:
    """Answers requests about one model; a subclass computes them.

    Args:
      work: fields of `Work`; directory: of the weights.
    """

    def __init__(self, work: dict[str, Any], directory: str) -> None:
        self.work = Work(**work)

    def versions(self) -> dict[str, str]:
        """Returns the versions of the libraries."""
        raise NotImplementedError

    def log_probs(self) -> np.ndarray:
        """Returns the `[rows, completion]` log-probs of the sequences that all contenders score."""
        raise NotImplementedError

    def rollout(self) -> np.ndarray:
        """Returns the `[rows, completion]` tokens of a rollout."""
        raise NotImplementedError

    def step(self, parts: Clock | Memory) -> None:
        """Does one RL step, with the parts "rollout" and "update"."""
        raise NotImplementedError

    def learn(self, path: str) -> None:
        """Does the first update of a new learner, see `suite.compare_updates`."""
        raise NotImplementedError

    def score(self, path: str) -> None:
        """Writes the log-probs."""
        np.save(path, self.log_probs())

    def run(self, part: str) -> dict[str, Seconds]:
        """Times a rollout, or a step, by its parts."""
        clock = Clock()
        self._run(part, clock)
        return clock.parts

    def peak(self, part: str) -> dict[str, int]:
        """Measures the bytes that the parts of a run add to the memory of the process."""
        memory = Memory()
        self._run(part, memory)
        return memory.parts

    def _run(self, part: str, parts: Clock | Memory) -> None:
        if part == "step":
            self.step(parts)
            return
        with parts.part("rollout"):
            tokens = self.rollout()
        expected = (self.work.rows, self.work.completion_length)
        if tokens.shape != expected or not ((tokens >= 0) & (tokens < self.work.vocab)).all():
            raise ValueError(f"tokens: got {tokens.shape}, expected {expected} ids of the vocabulary")
