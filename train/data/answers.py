r"""Answers of mathematics as text: the last box, exact numbers, and lists of them; neither sympy nor its rounding.

Numbers are integers, decimals, fractions, powers, factorials, binomials and sums, products and quotients of them, in
LaTeX or plain. They are fractions of Python, whose size is bounded, so that `2^{10^9}` costs nothing.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

MAX_LENGTH = 400
"""Characters of the longest text that is read, which also bounds the recursion."""
MAX_BITS = 1 << 17
"""Bits of the largest numerator and denominator: 39,000 digits."""
DECIMALS = 6
"""A decimal of as many digits, before and after it, may stand for a fraction that has no finite decimal form."""
BOX = "\\boxed"
THINK_END = "</think>"

_SPACES = re.compile(r"\\[,!;: ]|~|\\(?:left|right|displaystyle)(?![a-zA-Z])|\\?\$")
_WRITTEN_AS = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![a-zA-Z])"), r"\\binom"),
    (re.compile(r"\\(frac|binom)\s*(\d)\s*(?=[\d{])"), r"\\\1{\2}"),
    (re.compile(r"(\\(?:frac|binom)\{\d\})(\d)(?!\d)"), r"\1{\2}"),
    (re.compile(r"\*\*"), "^"),
    (re.compile("\\\\(?:times|cdot|ast)(?![a-zA-Z])|[\u00d7\u00b7\u22c5]"), "*"),
    (re.compile("\\\\div(?![a-zA-Z])|\u00f7"), "/"),
    (re.compile("[\u2212\u2013]"), "-"),  # minus sign, en dash
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?:\^\{?\\circ\}?|°)\s*$"), ""),
)
_ASSIGNED = re.compile(r"\s*([A-Za-z](?:_\{?\w+\}?)?)\s*=(?!=)\s*")
_PERCENT = re.compile(r"\s*(?:\\?%|percent)\s*$")
_GROUPED = r"[1-9]\d{0,2}(?:,\d{3})+(?!\d)|[1-9]\d{0,2}(?: \d{3})+(?! ?\d)"
_NUMBER = rf"(?:(?:{_GROUPED}|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?".replace(r"\d", "[0-9]")
_TOKEN = re.compile(rf"\s*({_NUMBER}|\\frac(?![a-zA-Z])|\\binom(?![a-zA-Z])|[-+*/^!(){{}}])")
_DECIMAL = re.compile(r"\d[\d, ]*\.(\d+)|\.(\d+)")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ELLIPSIS = re.compile(r"\\[lcd]?dots[a-z]?(?![a-zA-Z])|\.\.\.|…")


@dataclass(frozen=True)
class ExactNumber:
    """A number in a text.

    Attributes:
      value: without the percent sign.
      percent: whether it has one.
      decimals: digits after the point, if it is written as a decimal alone.
      variable: the variable that it is assigned to, as in `x = 5`.
    """

    value: Fraction
    percent: bool = False
    decimals: int = 0
    variable: str = ""


class _NotANumber(Exception):
    """Raised for a text that is no exact number, or one that is too large."""


def tagged_answer(text: str) -> str | None:
    """Extracts the content of the last `<answer>`; None if there is none, or it is not closed.

    Example:
        >>> tagged_answer("<answer>6</answer> or rather <answer>7</answer>"), tagged_answer("<answer>7")
        ('7', None)
    """
    answers = _TAGGED.findall(text)
    return str(answers[-1]) if answers else None


def tagged_or_last_line(text: str) -> str:
    """Extracts the content of the last `<answer>`, or else the last line that is not blank; "" if there is none.

    Example:
        >>> tagged_or_last_line("6 and 7: <answer>6*7</answer>, I think"), tagged_or_last_line("so\\n6*7\\n")
        ('6*7', '6*7')
    """
    answer = tagged_answer(text)
    if answer is not None:
        return answer
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def last_boxed(text: str) -> str | None:
    """Extracts the content of the last `\\boxed{...}`, with its braces matched; None if no box is closed.

    Example:
        >>> last_boxed(r"so \\boxed{1}, or rather $\\boxed{\\frac{1}{2}}$.")
        '\\\\frac{1}{2}'
    """
    start = text.rfind(BOX + "{")
    if start < 0:
        return None
    start += len(BOX) + 1
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def exact_number(text: str) -> ExactNumber | None:
    """Reads an exact number; None for any other text, and for numbers of more than `MAX_BITS`.

    Example:
        >>> exact_number(r"\\frac{2^{3}+1}{3!}").value, exact_number("1,000.50").value, exact_number("42\\\\%")
        (Fraction(3, 2), Fraction(2001, 2), ExactNumber(value=Fraction(42, 1), percent=True, decimals=0, variable=''))
    """
    if len(text) > MAX_LENGTH:
        return None
    text = _written_plainly(text)
    variable = ""
    if assigned := _ASSIGNED.match(text):
        variable = assigned[1]
        text = text[assigned.end() :]
    without_percent = _PERCENT.sub("", text)
    try:
        value = _NumberParser(list(_tokens(without_percent))).parse()
    except (_NotANumber, RecursionError):
        return None
    decimal = _DECIMAL.fullmatch(without_percent.strip().lstrip("+-"))
    decimals = len(decimal[1] or decimal[2]) if decimal else 0
    return ExactNumber(value, without_percent != text, decimals, variable)


def compare_answers(gold: str, answer: str) -> bool | None:
    """Compares two answers where both are exact numbers, or lists of them; None leaves them to others.

    An integer with a percent sign is that integer, and a hundredth of it. A decimal of six digits or more is equal to a
    fraction that has no finite decimal form, if it is the fraction up to its last digit. Lists with unequal numbers are
    unequal; others are not decided.

    Example:
        >>> compare_answers("0.0000001", r"10^{-7}"), compare_answers("1/3", "0.333333"), compare_answers("x", "1")
        (True, True, None)
        >>> compare_answers("(0.1, 2)", "(0.2, 2)"), compare_answers("(0.1, 2)", "(0.1, 2)")
        (False, None)
    """
    first = exact_number(gold)
    second = exact_number(answer)
    if first is not None and second is not None:
        if first.variable and second.variable and first.variable != second.variable:
            return None
        return _equal(first, second)
    brackets, numbers = _list_of(gold) if first is None else ("", [first])
    other_brackets, others = _list_of(answer) if second is None else ("", [second])
    if first is not None or second is not None:
        pairs = [(a, b) for a in numbers for b in others]
    elif brackets == other_brackets and len(numbers) == len(others):
        pairs = list(zip(numbers, others, strict=True))
    else:
        return None
    return None if all(_equal(a, b) for a, b in pairs) else False


def compare_series(gold: str, answer: str) -> bool | None:
    r"""Compares lists with an ellipsis, such as `1, 2, \ldots, n`, as text; None if neither is one.

    Example:
        >>> compare_series(r"1, 2, \ldots, n", "1,2,...,n"), compare_series(r"1, 2, \ldots, n", r"1, 3, \ldots, n")
        (True, False)
    """
    if not any("," in text and _ELLIPSIS.search(text) for text in (gold, answer)):
        return None
    plain = (re.sub(r"\s|\.$", "", _SPACES.sub("", _ELLIPSIS.sub("…", text))) for text in (gold, answer))
    return len(set(plain)) == 1


def _equal(first: ExactNumber, second: ExactNumber) -> bool:
    if first.percent != second.percent:
        percent, other = (first, second) if first.percent else (second, first)
        hundredth = replace(percent, value=percent.value / 100, decimals=percent.decimals and percent.decimals + 2)
        integers = percent.value.denominator == 1 and other.value.denominator == 1
        return _close(hundredth, other) or (integers and percent.value == other.value)
    return _close(first, second)


def _close(first: ExactNumber, second: ExactNumber) -> bool:
    """Whether two numbers are equal, or one is a decimal and the other has no finite decimal form and rounds to it."""
    if first.value == second.value:
        return True
    decimal, other = (first, second) if first.decimals else (second, first)
    unit = Fraction(1, 10**decimal.decimals)
    if decimal.decimals < DECIMALS or abs(decimal.value) < unit * 10 ** (DECIMALS - 1):
        return False
    return abs(decimal.value - other.value) < unit and not _is_finite_decimal(other.value)


def _is_finite_decimal(value: Fraction) -> bool:
    return pow(10, value.denominator.bit_length(), value.denominator) == 0


def _written_plainly(text: str) -> str:
    text = _SPACES.sub("", text)
    for pattern, plain in _WRITTEN_AS:
        text = pattern.sub(plain, text)
    return text.strip().removesuffix(".") if _ELLIPSIS.search(text) is None else text


def _list_of(text: str) -> tuple[str, list[ExactNumber]]:
    """Reads a list of exact numbers: its brackets, and the numbers, in their order if that matters; none of others."""
    text = _written_plainly(text)
    brackets = next((b for b in ("\\{ \\}", "( )", "[ ]", "( ]", "[ )") if _is_within(text, *b.split())), " ")
    opening, closing = brackets.split(" ")
    parts = list(_split(text.removeprefix(opening).removesuffix(closing)))
    numbers = [number for number in map(exact_number, parts) if number is not None]
    if len(parts) < 2 or len(numbers) < len(parts):
        return brackets, []
    ordered = opening in ("(", "[")
    return brackets, numbers if ordered else sorted(numbers, key=lambda number: number.value)


def _is_within(text: str, opening: str, closing: str) -> bool:
    return text.startswith(opening) and text.endswith(closing)


def _split(text: str) -> Iterator[str]:
    """Splits a text at the commas outside of brackets."""
    depth = 0
    start = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _tokens(text: str) -> Iterator[str]:
    position = 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _NotANumber
        yield match[1]
        position = match.end()


class _NumberParser:
    """Recursive-descent parser of the grammar

    sum = product (("+" | "-") product)*; product = signed (("*" | "/") signed)*; signed = ("+" | "-")* power;
    power = factor ["^" (signed number | group)]; factor = atom ["!"];
    atom = number [fraction] | group | fraction | "\\binom" group group; fraction = "\\frac" group group;
    group = "(" sum ")" | "{" sum "}".
    """

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]
        self._position = 0

    def parse(self) -> Fraction:
        value = self._sum()
        if self._peek():
            raise _NotANumber
        return value

    def _peek(self) -> str:
        return self._tokens[self._position]

    def _next(self) -> str:
        token = self._peek()
        self._position += bool(token)
        return token

    def _take(self, *tokens: str) -> str:
        """Takes the next token if it is one of these; else returns ""."""
        return self._next() if self._peek() in tokens else ""

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("+", "-"):
            term = self._product()
            value = _bounded(value + term if sign == "+" else value - term)
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while sign := self._take("*", "/"):
            factor = self._signed()
            value = _bounded(value * factor) if sign == "*" else _quotient(value, factor)
        return value

    def _signed(self) -> Fraction:
        sign = 1
        while token := self._take("+", "-"):
            sign *= -1 if token == "-" else 1
        return sign * self._power()

    def _power(self) -> Fraction:
        base = self._factor()
        if not self._take("^"):
            return base
        sign = -1 if self._take("-") else 1
        exponent = sign * (self._group() if self._peek() in ("(", "{") else _literal(self._next()))
        if exponent.denominator != 1 or self._peek() in ("^", "!"):
            raise _NotANumber
        return _power(base, int(exponent))

    def _factor(self) -> Fraction:
        value = self._atom()
        if self._take("!"):
            if value.denominator != 1 or value < 0 or value > MAX_BITS or self._peek() == "!":
                raise _NotANumber
            value = _factorial(int(value))
        return value

    def _atom(self) -> Fraction:
        token = self._peek()
        if token in ("(", "{"):
            return self._group()
        token = self._next()
        if token == "\\frac":
            return _quotient(self._group(), self._group())
        if token == "\\binom":
            return _binomial(self._group(), self._group())
        value = _literal(token)
        if self._peek() == "\\frac":  # a mixed number
            part = self._atom()
            if value.denominator != 1 or "." in token or not 0 < part < 1:
                raise _NotANumber
            value += part
        return value

    def _group(self) -> Fraction:
        closing = {"(": ")", "{": "}"}.get(self._next())
        value = self._sum()
        if closing is None or self._next() != closing:
            raise _NotANumber
        return value


def _literal(token: str) -> Fraction:
    if not re.fullmatch(_NUMBER, token):
        raise _NotANumber
    digits, _, exponent = token.replace(",", "").replace(" ", "").lower().partition("e")
    try:
        return _bounded(Fraction(digits.removesuffix(".")) * _power(Fraction(10), int(exponent or 0)))
    except ValueError as error:  # more digits than Python reads
        raise _NotANumber from error


def _quotient(value: Fraction, divisor: Fraction) -> Fraction:
    if not divisor:
        raise _NotANumber
    return _bounded(value / divisor)


def _power(base: Fraction, exponent: int) -> Fraction:
    if base == 0 and exponent <= 0:
        raise _NotANumber
    if max(_bits(base) - 1, 0) * abs(exponent) > MAX_BITS:
        raise _NotANumber
    return base**exponent


def _factorial(number: int) -> Fraction:
    if math.lgamma(number + 1) > MAX_BITS * math.log(2):
        raise _NotANumber
    return Fraction(math.factorial(number))


def _binomial(total: Fraction, part: Fraction) -> Fraction:
    if total.denominator != 1 or part.denominator != 1 or not 0 <= part <= total <= MAX_BITS // 8:
        raise _NotANumber
    return _bounded(Fraction(math.comb(int(total), int(part))))


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise _NotANumber
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
