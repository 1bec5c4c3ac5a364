"""Worker module: answers `{"gold", "text"}` with whether they are equal, by math-verify.

math-verify finds the answer in a text. Exact numbers are compared here: it rounds them to six decimals. A completion
such as `9^{9^{9}}` can keep sympy busy until the process is killed.
"""

import functools
import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException
from math_verify.grader import get_pct_val

from train.data.answers import compare_answers, compare_series, last_boxed
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


def _answer_text(parsed: Sequence[Any]) -> str:
    """Returns the text that math-verify made an expression of, without units, as it keeps it; "" if there is none."""
    texts = [part for part in parsed if isinstance(part, str)]
    expression = next((part for part in parsed if not isinstance(part, str)), None)
    text = texts[-1] if texts else ""
    return f"{text}%" if get_pct_val(expression) is not None and not text.endswith("%") else text


def equal(gold: str, text: str) -> bool:
    """Checks whether the last answer in `text` is mathematically equal to `gold`; False if `gold` cannot be parsed."""
    series = compare_series(gold, last_boxed(text) or "")
    if series is not None:
        return series
    expected = _gold(gold)
    answer = _parse(text)
    decided = compare_answers(_answer_text(expected) or gold, _answer_text(answer))
    if decided is not None:
        return decided
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
