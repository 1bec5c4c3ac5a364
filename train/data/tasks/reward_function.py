"""The reward function of the user: found by name, called within a limit of time, and its result checked."""

import pickle

from train.config.errors import UserError
from train.config.user_functions import find_function
from train.data.reward_call import RewardFunction, WrongRewardError, call_reward
from train.data.reward_signature import RecordFields, RewardSignature, signature_problem
from train.data.tasks.task import Example
from train.data.tasks.user_score import UserScore
from train.data.workers.process import NoAnswer, NotStarted, TooLate, WorkerPool
from train.process.time_limit import TookTooLongError, time_limit
from train.process.waiting import waiting_for

IMPORT_SECONDS = 600.0
"""Longest import of the function in a worker process, which may load a model."""


class Verifier(UserScore):
    """A reward function as the `score` of a task."""

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
        super().__init__(f"data.reward: {name}")
        self._name = name
        self._timeout = timeout
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
            with waiting_for(f"the import of {self.label}"):
                answer = pool.ask(None)
        except (NoAnswer, NotStarted) as error:
            raise UserError(f"data.reward: cannot import {self._name!r} in a worker process: {error}") from None
        if "error" in answer:
            raise UserError(answer["error"])
        return RewardSignature.from_json(answer["signature"])

    def call(self, example: Example, completion: str, finished: bool) -> dict[str, float]:
        """Calls the function within its limit.

        Raises:
          WrongRewardError: as `call_reward`, or the call takes too long or ends its process.
        """
        try:
            if self._function is not None:
                with time_limit(self._timeout):
                    return call_reward(self._function, example.record, completion, finished)
            assert self._pool is not None
            question = {"record": dict(example.record), "completion": completion, "finished": finished}
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
