"""Scores by code of the user, checked: every failure names the function, the prompt and the completion."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from train.config.errors import UserError
from train.data.reward_call import WrongRewardError, named_rewards, returned_by
from train.data.tasks.task import Example
from train.process.waiting import waiting_for


class RewardError(UserError):
    """A reward function that failed; the state before the step can be saved."""


class UserScore:
    """The `score` of a task that runs code of the user, whatever that does. Its errors end the run.

    Attributes:
      label: names the function in errors: the field of the config, and the function.
      names: the rewards that the first call returned; None before it.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.names: tuple[str, ...] | None = None
        self._lock = threading.Lock()

    def __call__(self, example: Example, completion: str, finished: bool) -> dict[str, float]:
        """Scores a completion; "correct" is 1 for a reward of at least 1, if the function does not return it.

        Raises:
          RewardError: the call fails, takes too long, or returns no numbers or other names than before.
        """
        try:
            values = self.call(example, completion, finished)
            self._check(values)
        except WrongRewardError as error:
            raise RewardError(
                f"{self.label} for the prompt {str(example.prompt)[:80]!r} and the completion {completion[:80]!r}: "
                f"{error}"
            ) from error
        return {"correct": float(values.get("reward", 0.0) >= 1), **values}

    def call(self, example: Example, completion: str, finished: bool) -> dict[str, float]:
        """Returns the named rewards; raises `WrongRewardError` if the call fails."""
        raise NotImplementedError

    def _check(self, values: Mapping[str, float]) -> None:
        names = tuple(sorted(values))
        with self._lock:
            self.names = self.names or names
        if names != self.names:
            raise WrongRewardError(f"returned the rewards {', '.join(names)}, but {', '.join(self.names)} before")
        if not 0 <= values.get("correct", 0) <= 1:
            raise WrongRewardError(f"returned 'correct': {values['correct']:g}, expected 0 to 1: accuracy is its mean")


class TaskScore(UserScore):
    """The `score` of a task of the user, which this process calls, without a limit of time."""

    def __init__(self, name: str, score: Callable[[Example, str, bool], Any]) -> None:
        """Takes the name of the function that made the task, and the score."""
        super().__init__(f"task: {name}: score")
        self._score = score

    def call(self, example: Example, completion: str, finished: bool) -> dict[str, float]:
        """Calls the score; tells a wait of a minute."""
        with waiting_for(f"{self.label} for the prompt {str(example.prompt)[:80]!r}"):
            return named_rewards(returned_by(self._score, example, completion, finished))
