"""Arithmetic that a model wrote, read without running it: integers, `+ - * /` and parentheses, in exact fractions."""

import re
from fractions import Fraction
from typing import NamedTuple

# Longer texts are refused before they are read, and so is what would recurse deeply.
MAX_LENGTH = 200
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")


class Value(NamedTuple):
    """What an expression is, and the integers that it was written with, in order."""

    value: Fraction
    numbers: tuple[int, ...]


class NotArithmetic(ValueError):
    """The text is no expression, or divides by zero."""


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_LENGTH:
        raise NotArithmetic(f"longer than {MAX_LENGTH} characters")
    tokens, place = [], 0
    text = text.strip()
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise NotArithmetic(f"got {text[place]!r}")
        tokens.append(found[1] or found[2])
        place = found.end()
    return tokens


class _Reader:
    """By the grammar

    sum = product (("+" | "-") product)*; product = factor (("*" | "/") factor)*;
    factor = number | "(" sum ")" | "-" factor.
    """

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]
        self._place = 0
        self.numbers: list[int] = []

    def _next(self) -> str:
        token = self._tokens[self._place]
        self._place += bool(token)
        return token

    def _peek(self) -> str:
        return self._tokens[self._place]

    def sum(self) -> Fraction:
        total = self.product()
        while self._peek() in ("+", "-"):
            sign = 1 if self._next() == "+" else -1
            total += sign * self.product()
        return total

    def product(self) -> Fraction:
        result = self.factor()
        while self._peek() in ("*", "/"):
            if self._next() == "*":
                result *= self.factor()
            else:
                divisor = self.factor()
                if not divisor:
                    raise NotArithmetic("division by zero")
                result /= divisor
        return result

    def factor(self) -> Fraction:
        token = self._next()
        if token == "-":
            return -self.factor()
        if token == "(":
            inner = self.sum()
            if self._next() != ")":
                raise NotArithmetic("a parenthesis is not closed")
            return inner
        if not token.isdigit():
            raise NotArithmetic(f"got {token or 'nothing'!r}, expected a number")
        self.numbers.append(int(token))
        return Fraction(int(token))

    def ended(self) -> bool:
        return not self._peek()


def evaluate(text: str) -> Value:
    """The value of an expression and the numbers in it.

    Raises:
      NotArithmetic: it is anything else than numbers, operations and parentheses, or divides by zero.

    Example:
      >>> evaluate("(7 - 3) / 8")
      Value(value=Fraction(1, 2), numbers=(7, 3, 8))
    """
    reader = _Reader(_tokens(text))
    value = reader.sum()
    if not reader.ended():
        raise NotArithmetic("more follows the expression")
    return Value(value, tuple(reader.numbers))
