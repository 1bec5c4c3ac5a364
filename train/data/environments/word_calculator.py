"""A calculator for word problems of one operation, with numbers that a small language model cannot multiply."""

import operator
import re

from train.data.tasks import Example
from train.data.tasks.word_problems import score

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALL_REWARD = 0.2
"""Of an episode that computed the answer, whatever it says then: groups without a right answer learn to call."""


class WordCalculator:
    """An episode with a calculator, rewarded for the answer and, less, for a call that computes it."""

    def reset(self, prompt: str, answer: str) -> None:
        """Begins an episode."""
        self._example = Example(prompt, answer, "")
        self._computed = False

    def calc(self, expression: str) -> str:
        """Computes a sum, a difference or a product of two whole numbers, such as 12*34."""
        result = compute(expression)
        self._computed |= result == self._example.answer
        return result

    def reward(self, text: str, finished: bool) -> dict[str, float]:
        """Returns the scores of the last turn, and whether the tool computed the answer, at least once."""
        scores = score(self._example, text, finished)
        computed = float(self._computed)
        return {**scores, "computed": computed, "reward": scores["correct"] + CALL_REWARD * computed}


def compute(expression: str) -> str:
    """Computes one operation on two whole numbers of at most six digits; anything else is `error`.

    Example:
      >>> compute("12*34"), compute("12 - 34"), compute("12/3"), compute("1+2+3")
      ('408', '-22', 'error', 'error')
    """
    match = re.fullmatch(r"\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*", expression, re.ASCII)
    return "error" if match is None else str(OPERATIONS[match[2]](int(match[1]), int(match[3])))
