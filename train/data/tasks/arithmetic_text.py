"""A parser of arithmetic expressions: integers, `+ - * /` and parentheses, in exact fractions. Never calls `eval`."""

import re
from fractions import Fraction
from typing import NamedTuple

# Longer texts are rejected before parsing, which also bounds the recursion.
MAX_LENGTH = 200
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")


class Value(NamedTuple):
    """The value of an expression, and the integers in it in order."""

    value: Fraction
    numbers: tuple[int, ...]


class NotArithmetic(ValueError):
    """Raised for a text that is no expression or divides by zero."""


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_LENGTH:
        raise NotArithmetic(f"longer than {MAX_LENGTH} characters")
    tokens = []
    position = 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotArithmetic(f"got {text[position]!r}")
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


class _Parser:
    """Recursive-descent parser of the grammar

    sum = product (("+" | "-") product)*; product = factor (("*" | "/") factor)*;
    factor = number | "(" sum ")" | "-" factor.
    """

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]
        self._position = 0
        self.numbers: list[int] = []

    def _next(self) -> str:
        token = self._tokens[self._position]
        self._position += bool(token)
        return token

    def _peek(self) -> str:
        return self._tokens[self._position]

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
    """Evaluates an expression, and lists the numbers in it.

    Raises:
      NotArithmetic: the text has anything but numbers, operations and parentheses, or divides by zero.

    Example:
        >>> evaluate("(7 - 3) / 8")
        Value(value=Fraction(1, 2), numbers=(7, 3, 8))
    """
    parser = _Parser(_tokens(text))
    value = parser.sum()
    if not parser.ended():
        raise NotArithmetic("got text after the expression")
    return Value(value, tuple(parser.numbers))
