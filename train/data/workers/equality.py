"""Worker module: answers `{"gold", "text"}` with whether they are equal, by math-verify.

A completion such as `9^{9^{9}}` can keep sympy busy until the process is killed.
"""

import functools
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from train.data.workers.serve import serve

MEMORY = 4 << 30
# CPU seconds of each parse and each comparison. The limits of math-verify itself count the time of a clock, by which an
# answer may be wrong on a busy machine only.
SECONDS = 3.0


def _ring(*_: Any) -> None:
    raise TimeoutException


@contextmanager
def _limit() -> Iterator[None]:
    """Interrupts the block after each `SECONDS` of CPU time; math-verify takes it as its own limit."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _parse(text: str) -> Any:
    with _limit():
        return parse(text, parsing_timeout=None)


@functools.lru_cache(maxsize=4096)
def _gold(text: str) -> Any:
    return _parse(f"\\boxed{{{text}}}")


def equal(gold: str, text: str) -> bool:
    """Checks whether the last answer in `text` is mathematically equal to `gold`; False if `gold` cannot be parsed."""
    expected, answer = _gold(gold), _parse(text)
    with _limit():
        return bool(verify(expected, answer, timeout_seconds=None))


def reply(question: Any) -> bool:
    """Answers a question; None asks for nothing but the start of math-verify."""
    try:
        return equal("1", "1") if question is None else equal(question["gold"], question["text"])
    except (Exception, TimeoutException):  # any error of sympy, including MemoryError
        return False


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGVTALRM, _ring)
    serve(reply, memory=MEMORY)
