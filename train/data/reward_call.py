"""One call of a reward function: how it is called, and what it may return. A worker process imports this alone."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from train.config.float32 import fits_float32
from train.config.user_functions import failure

RewardFunction = Callable[..., float | Mapping[str, float]]


class WrongRewardError(Exception):
    """Raised for a call of a reward function that failed; the text tells how."""


def call_reward(
    function: RewardFunction, record: Mapping[str, Any], completion: str, finished: bool
) -> dict[str, float]:
    """Calls a reward function; returns its named rewards.

    Raises:
      WrongRewardError: the function raises, or returns other than names and finite numbers of float32.
    """
    return named_rewards(returned_by(function, record, completion, finished))


def returned_by(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a function of the user; returns its result, a mapping as a dict.

    Raises:
      WrongRewardError: the function raises, or the result cannot be read; with its lines of the traceback.
    """
    try:
        with _alarm_kept():
            returned = function(*arguments, **options)
        return dict(returned) if isinstance(returned, Mapping) else returned
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, which would end the run without a word
        raise WrongRewardError(failure(error)) from error


def named_rewards(returned: Any) -> dict[str, float]:
    """Converts a number, which is then "reward", or a mapping of names to numbers.

    Raises:
      WrongRewardError: it is something else, or a number is not finite in float32.
    """
    values = {}
    for name, value in (returned if isinstance(returned, dict) else {"reward": returned}).items():
        try:
            number = _number(value)
        except Exception as error:  # a number may be of a class of the function's own
            text = f"returned {name!r}, whose number cannot be read: {type(error).__name__}: {error}"
            raise WrongRewardError(text) from error
        if not isinstance(name, str) or number is None:
            raise WrongRewardError(f"returned {name!r}: {_shown(value)}, expected names and finite numbers of float32")
        values[name] = number
    if not values:
        raise WrongRewardError("returned no rewards, expected a number, or numbers by name")
    return values


@contextmanager
def _alarm_kept() -> Iterator[None]:
    """Puts SIGALRM back after the block: an alarm that it leaves would end the process later, outside of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGALRM)
    armed = signal.getitimer(signal.ITIMER_REAL)[0] > 0
    try:
        yield
    finally:
        if not armed and signal.getitimer(signal.ITIMER_REAL)[0] > 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if before is not None and signal.getsignal(signal.SIGALRM) is not before:
            signal.signal(signal.SIGALRM, before)


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
