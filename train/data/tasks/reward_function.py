"""The reward function of the user: found by name, called within a limit of time, and its result checked."""

import pickle
import threading
from collections.abc import Mapping
from typing import Any

from train.config.errors import UserError
from train.config.user_functions import find_function
from train.data.reward_call import RewardFunction, WrongRewardError, call_reward
from train.data.reward_signature import RecordFields, RewardSignature, signature_problem
from train.data.tasks.task import Example
from train.data.workers.process import NoAnswer, NotStarted, TooLate, WorkerPool
from train.process.time_limit import TookTooLongError, time_limit

IMPORT_SECONDS = 600.0
"""Longest import of the function in a worker process, which may load a model."""


class RewardError(UserError):
    """A reward function that failed; the state before the step can be saved."""


class Verifier:
    """A reward function as the `score` of a task; its errors name the example and end the run."""

    def __init__(self, name: str, *, workers: int, timeout: float, fields: RecordFields | None = None) -> None:
        """Imports the function, in a worker process if there are any.

        Args:
          name: as of `find_function`.
          workers: processes that call the function, which are ended after the limit; 0: this one calls it, and
            `time_limit` interrupts it.
          timeout: seconds that a call may take.
          fields: of the records, for the error of a function that takes other arguments.

        Raises:
          UserError: the function cannot be imported, or takes other arguments than record, completion and finished.
        """
        self._name, self._timeout, self._lock = name, timeout, threading.Lock()
        self._names: tuple[str, ...] | None = None
        self._function: RewardFunction | None = None
        self._pool: WorkerPool | None = None
        if workers:
            self._pool = WorkerPool(
                "reward",
                name,
                workers=workers,
                output=True,
                environment={"JAX_PLATFORMS": "cpu"},  # an accelerator belongs to the trainer
                start_seconds=IMPORT_SECONDS,
            )
            signature = self._start(self._pool)
        else:
            function = find_function("data.reward", name)
            signature = RewardSignature.of(function)
            self._function = signature.bind(function)
        problem = signature_problem(name, signature, fields or RecordFields())
        if problem is not None:
            raise UserError(f"data.reward: {problem}")

    def _start(self, pool: WorkerPool) -> RewardSignature:
        """Starts a process, which imports the function and tells its signature."""
        try:
            answer = pool.ask(None)
        except (NoAnswer, NotStarted) as error:
            raise UserError(f"data.reward: cannot import {self._name!r} in a worker process: {error}") from None
        if "error" in answer:
            raise UserError(answer["error"])
        return RewardSignature.from_json(answer["signature"])

    def __call__(self, example: Example, completion: str, finished: bool) -> dict[str, float]:
        """Scores a completion; as `Task.score`.

        Raises:
          RewardError: the call fails, takes too long, or returns no numbers or other names than before.
        """
        try:
            values = self._values(example.record, completion, finished)
            self._check_names(tuple(sorted(values)))
        except WrongRewardError as error:
            raise RewardError(
                f"data.reward: {self._name} for the prompt {example.prompt[:80]!r} and the completion "
                f"{completion[:80]!r}: {error}"
            ) from error
        if "correct" not in values:
            values["correct"] = float(values.get("reward", 0.0) >= 1)
        return values

    def _values(self, record: Mapping[str, Any], completion: str, finished: bool) -> dict[str, float]:
        try:
            if self._function is not None:
                with time_limit(self._timeout):
                    return call_reward(self._function, record, completion, finished)
            assert self._pool is not None
            question = {"record": dict(record), "completion": completion, "finished": finished}
            answer = self._pool.ask(question, seconds=self._timeout)
        except (TookTooLongError, TooLate) as error:
            raise WrongRewardError(f"{error} (rewards.timeout)") from None
        except (NoAnswer, NotStarted) as error:
            raise WrongRewardError(str(error)) from None
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise WrongRewardError(
                f"the record cannot be sent to a worker process ({error}); set rewards.workers=0"
            ) from None
        if "error" in answer:
            raise WrongRewardError(answer["error"])
        return dict(answer["rewards"])

    def _check_names(self, names: tuple[str, ...]) -> None:
        with self._lock:
            self._names = self._names or names
        if names != self._names:
            raise WrongRewardError(f"returned the rewards {', '.join(names)}, but {', '.join(self._names)} before")
