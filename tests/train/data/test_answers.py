"""Exact numbers are compared exactly, whatever math-verify rounds; the rest stays with it."""

import math
import random
import time
from fractions import Fraction

import pytest

from train.data.answers import MAX_BITS, MAX_LENGTH, compare_answers, exact_number
from train.data.tasks.equality import Judge

UNEQUAL = [
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    ("0.0000001", "0.0000002"),
    ("1000000.0000001", "1000000.0000002"),
    ("0.1234567", "0.1234569"),
    (r"6.02\times 10^{-23}", r"1.38\times 10^{-23}"),
    (r"\frac{1}{30!}", r"\frac{1}{31!}"),
    (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}"),
    (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1"),
    ("2", r"1, 2, \ldots, n"),
    ("1e-7", "2e-7"),
    ("2^{-40}", "2^{-41}"),
    ("10^{-9}", "10^{-10}"),
    ("0", "0.0000001"),
    ("10^{-9}", "0"),
    ("0.0000001", r"\frac{1}{30000000}"),
    ("0.0000000", r"\frac{1}{30000000}"),
    ("1/3", "0.33333"),
    ("1/4", "0.2500001"),
    (r"0.0000001\%", r"0.0000002\%"),
    ("0.5", r"0.5\%"),
    ("x=0.0000001", "0.0000002"),
    ("x=5", "y=5"),
    ("(0.0000001, 1)", "(0.0000002, 1)"),
    (r"\{0.0000001, 1\}", r"\{0.0000002, 1\}"),
    ("(1, 2)", "(2, 1)"),
    ("1", "1, 2"),
    ("[1, 2]", "(1, 2)"),
    ("10^{100}", "10^{100}+1"),
    ("42", "43"),
    (r"\text{north}", "north-east"),
]
EQUAL = [
    ("1e-7", "10^{-7}"),
    ("0.0000001", "1e-7"),
    (r"\frac{1}{2004!}", r"\frac{2005}{2005!}"),
    (r"\frac{1}{2^{99}}", "2^{-99}"),
    ("6.02e23", r"6.02 \times 10^{23}"),
    ("1/3", "0.333333"),
    (r"\frac{2}{3}", "0.66666667"),
    ("2/3", "0.666666"),
    ("1000", "1,000"),
    ("1000", "1{,}000"),
    ("1000", r"1\,000"),
    ("1000", "1 000"),
    ("1234567.5", "1,234,567.50"),
    ("7", "7."),
    ("42", r"42\%"),
    (r"42\%", "42"),
    (r"42\%", "0.42"),
    ("0.125", r"12.5\%"),
    (r"\frac{1}{2}\%", "0.005"),
    (r"\frac{1}{7}", r"14.2857\%"),
    ("5", "x=5"),
    ("x=5", "5"),
    ("x=5", "x = 5.0"),
    (r"\$5", "5"),
    ("5", r"5 \text{ cm}"),
    (r"90^\circ", "90"),
    (r"2\frac{1}{2}", "2.5"),
    (r"\dfrac12", "0.5"),
    ("120", "5!"),
    ("1024", "2^{10}"),
    ("2^{10^9}", "2^{10^9}"),
    ("10", r"\binom{5}{2}"),
    ("(1, 2)", "(1.0, 2)"),
    ("[1, 2)", "[1, 2)"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    ("1, 2", "2, 1"),
    (r"1, 2, \ldots, n", "1,2,...,n"),
    ("3:4", "0.75"),
    ("3", "|-3|"),
    ("2", r"\sqrt{4}"),
    ("x+1", "1+x"),
]
OTHER_TEXTS = (
    *("", ".", "x", "1 2", "2 1/2", "1.2.3", "3,14", "0,123", "1,00", "12_8", "2(3)", "2^{1/2}", r"\sqrt{4}", "1/0"),
    *("0^0", "5!!", "(-1)!", r"\frac{1}", "2^10^2", r"3\frac{5}{2}", "e", "1e", "\u0663", "(1", "1)", r"\pi", "1+"),
    *("inf", "nan", "1_000", "0x10", "2^10!"),
)
LARGE_TEXTS = (
    *("2^{10^9}", "9^{9^{9^9}}", "10^9!", "1e999999999", f"({'9' * 100})^{{9999}}", r"\binom{10^9}{5}", "9" * 9999),
    *("(" * 190 + "1" + ")" * 190, rf"\frac{{{MAX_BITS}!}}{{7}}", "2^{2^{16}} * 2^{2^{16}} * 2^{2^{16}}"),
)


@pytest.fixture(scope="module")
def judge():
    judge = Judge(workers=1, seconds=60)
    yield judge
    judge.close()


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_different_answers_are_unequal(judge, gold, answer):
    assert not judge.equal(gold, rf"so \boxed{{{answer}}}.")
    assert not judge.equal(answer, rf"so \boxed{{{gold}}}.")


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_forms_of_one_answer_are_equal(judge, gold, answer):
    assert judge.equal(gold, rf"so \boxed{{{answer}}}.")
    assert judge.equal(answer, rf"so \boxed{{{gold}}}.")


@pytest.mark.parametrize(
    ("gold", "completion"),
    [("0.0000001", "The answer is 0.0000001."), ("0.42", "It is $42$%."), ("1/8", r"so $\frac{1}{8}$")],
)
def test_answer_needs_no_box(judge, gold, completion):
    assert judge.equal(gold, completion)
    assert not judge.equal(f"{gold}0001", completion)


def literal(draw: random.Random) -> tuple[str, Fraction]:
    """Draws a number without operators."""
    digits, places = draw.randrange(1, 10**6), draw.choice([0, 0, 2, 7])
    if places:
        integer, part = divmod(digits, 10**places)
        return f"{integer}.{part:0{places}d}", Fraction(digits, 10**places)
    return draw.choice([str(digits), f"{digits:,}", f"{digits:,}".replace(",", "{,}")]), Fraction(digits)


def special(draw: random.Random) -> tuple[str, Fraction]:
    """Draws a factorial, a binomial or a number in scientific notation."""
    number, digits, exponent = draw.randrange(20), draw.randrange(1, 1000), draw.randrange(-30, 30)
    part, scientific = draw.randrange(number + 1), digits * Fraction(10) ** exponent
    return draw.choice(
        [
            (f"{number}!", Fraction(math.factorial(number))),
            (rf"\binom{{{number}}}{{{part}}}", Fraction(math.comb(number, part))),
            (rf"\left({digits} \times 10^{{{exponent}}}\right)", scientific),
            (f"{digits}e{exponent}", scientific),
        ]
    )


def expression(draw: random.Random, depth: int) -> tuple[str, Fraction]:
    """Draws a text and its value, which is computed beside it."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice([literal, special])(draw)
    (left, a), (right, b) = (expression(draw, depth - 1) for _ in range(2))
    exponent, product = draw.randrange(-3, 4), draw.choice(["*", r"\cdot", "\u00d7", r" \times "])
    values = [
        (f"({left}) + ({right})", a + b),
        (f"({left}) - ({right})", a - b),
        (f"({left}) {product} ({right})", a * b),
        (f"-({left})", -a),
    ]
    if b:
        values += [(rf"\frac{{{left}}}{{{right}}}", a / b), (f"({left}) / ({right})", a / b)]
    if a:
        values.append((f"({left})^{{{exponent}}}", a**exponent))
    return draw.choice(values)


def test_random_expressions_have_their_value():
    draw, read = random.Random(0), 0
    for _ in range(2000):
        text, value = expression(draw, draw.randrange(4))
        if len(text) <= MAX_LENGTH:
            assert exact_number(text).value == value, text
            read += 1
    assert read > 1500


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_other_texts_are_no_exact_numbers(text):
    assert exact_number(text) is None


@pytest.mark.parametrize("text", LARGE_TEXTS)
def test_large_texts_cost_nothing(text):
    started = time.process_time()
    assert exact_number(text) is None
    assert time.process_time() - started < 0.5


def test_largest_numbers_are_compared_quickly():
    large = rf"\frac{{1}}{{2^{{{MAX_BITS - 2}}}}}"
    started = time.process_time()
    assert compare_answers(large, rf"2^{{-{MAX_BITS - 2}}}")
    assert compare_answers(large, "0.3333333") is False
    assert compare_answers(r"\frac{1}{9000!}", r"\frac{1}{9001!}") is False
    assert time.process_time() - started < 0.5
