"""The reward function of the user: found by name, called within a limit of time, and its result checked."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from train.config.errors import UserError
from train.config.types import fits_float32
from train.config.user_functions import find_function
from train.data.tasks.task import Example
from train.data.workers.process import START_SECONDS, NoAnswer, NotStarted, WorkerPool

RewardFunction = Callable[[Mapping[str, Any], str, bool], float | Mapping[str, float]]


class RewardError(UserError):
    """A reward function that failed; the state before the step can be saved."""


class Wrong(Exception):
    """Raised for a call of a reward function that failed; the text tells how."""


class _Late(BaseException):
    """Raised in a reward function that takes too long."""


def _number(value: Any) -> float | None:
    """Converts a number, a NumPy scalar or an array without axes; None if it is no finite float32."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, bool) or fits_float32(value) else None


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80]
    except Exception:  # an integer of thousands of digits, or a class that has no text
        return f"a {type(value).__name__} without a text"


def call(function: RewardFunction, record: Mapping[str, Any], completion: str, finished: bool) -> dict[str, float]:
    """Calls a reward function; returns its named rewards.

    Raises:
      Wrong: the function raises, or returns other than names and finite numbers of float32.
    """
    try:
        returned = function(record, completion, finished)
        named = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    except (KeyboardInterrupt, _Late):
        raise
    except BaseException as error:  # also SystemExit, which would end the run without a word
        raise Wrong(f"{type(error).__name__}: {error}") from error
    values = {}
    for name, value in named.items():
        try:
            number = _number(value)
        except Exception as error:  # a number may be of a class of the function's own
            raise Wrong(f"returned {name!r}, whose number cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(name, str) or number is None:
            raise Wrong(f"returned {name!r}: {_shown(value)}, expected names and finite numbers of float32")
        values[name] = number
    return values


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupts the block after `seconds`, in the main thread; `Wrong` is raised.

    Code that sets SIGALRM itself switches the limit off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        if running:
            raise _Late

    running, before = True, signal.signal(signal.SIGALRM, ring)
    try:
        # It rings again, because the code may catch everything.
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        yield
    except _Late:
        raise Wrong(f"no answer within {seconds:g} s (rewards.timeout)") from None
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Verifier:
    """A reward function as the `score` of a task; its errors name the example and end the run."""

    def __init__(self, name: str, *, workers: int, timeout: float) -> None:
        """Imports the function, in worker processes if there are any.

        Args:
          name: as of `find_function`.
          workers: processes that call the function; 0: this one does.
          timeout: seconds that a call may take.

        Raises:
          UserError: the function cannot be imported.
        """
        self._name, self._timeout, self._lock = name, timeout, threading.Lock()
        self._names: tuple[str, ...] | None = None
        self._function: RewardFunction | None = None
        self._pool: WorkerPool | None = None
        if workers:
            # An accelerator belongs to the trainer.
            self._pool = WorkerPool("reward", name, workers=workers, output=True, environment={"JAX_PLATFORMS": "cpu"})
            self._start(self._pool)
        else:
            self._function = find_function("data.reward", name)

    def _start(self, pool: WorkerPool) -> None:
        """Starts a process, which imports the function."""
        try:
            answer = pool.ask(None, seconds=START_SECONDS)
        except (NoAnswer, NotStarted) as error:
            raise UserError(f"data.reward: cannot import {self._name!r} in a worker process: {error}") from None
        if "error" in answer:
            raise UserError(answer["error"])

    def __call__(self, example: Example, completion: str, finished: bool) -> dict[str, float]:
        """Scores a completion; as `Task.score`.

        Raises:
          RewardError: the call fails, takes too long, or returns no numbers or other names than before.
        """
        try:
            values = self._values(example.record, completion, finished)
            self._check_names(tuple(sorted(values)))
        except Wrong as error:
            raise RewardError(
                f"data.reward: {self._name} for the prompt {example.prompt[:80]!r} and the completion "
                f"{completion[:80]!r}: {error}"
            ) from error
        if "correct" not in values:
            values["correct"] = float(values.get("reward", 0.0) >= 1)
        return values

    def _values(self, record: Mapping[str, Any], completion: str, finished: bool) -> dict[str, float]:
        if self._function is not None:
            with time_limit(self._timeout):
                return call(self._function, record, completion, finished)
        assert self._pool is not None
        question = {"record": dict(record), "completion": completion, "finished": finished}
        try:
            answer = self._pool.ask(question, seconds=self._timeout)
        except (NoAnswer, NotStarted) as error:
            raise Wrong(f"{error} (rewards.timeout)") from None
        except TypeError as error:  # a record of a dataset may hold more than JSON
            raise Wrong(f"the record cannot be sent to a worker process ({error}); set rewards.workers=0") from None
        if "error" in answer:
            raise Wrong(answer["error"])
        return dict(answer["rewards"])

    def _check_names(self, names: tuple[str, ...]) -> None:
        with self._lock:
            self._names = self._names or names
        if names != self._names:
            raise Wrong(f"returned the rewards {', '.join(names)}, but {', '.join(self._names)} before")
