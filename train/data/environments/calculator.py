"""A calculator, for a model that cannot multiply."""

LONGEST = 6


class Calculator:
    """An episode with a calculator; the task scores its last turn."""

    def reset(self) -> None:
        """Begins an episode."""

    def calc(self, expression: str) -> str:
        """Computes products and sums of positive whole numbers, such as 12*7+5."""
        return compute(expression)


def compute(expression: str) -> str:
    """Computes products and sums of positive whole numbers; anything else is `error`.

    Example:
      >>> compute("12*7+5"), compute("12/7"), compute("1*")
      ('89', 'error', 'error')
    """
    total = 0
    for term in expression.split("+"):
        product = 1
        for factor in term.split("*"):
            if not (factor.isascii() and factor.isdigit()) or len(factor) > LONGEST:
                return "error"
            product *= int(factor)
        total += product
    return str(total)
