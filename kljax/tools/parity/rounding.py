"""Rounding bounds: how far a result may lie from the exact one because its dtype rounds.

A result in a dtype of unit roundoff `u` (half the distance of 1 to the next number) is the exact result of operations
that each have a relative error of at most `u`, and of `exp` and `log` of at most `4 u`, the two units in the last place
that GPU and CPU libraries promise. The bounds follow by carrying these errors through each stage, to first order:

- a difference of recorded numbers, `d = a - b`: `u |d|`
- a ratio `exp(d)`: `exp(d) (u |d| + 4 u)`
- k3 as systems write it, `exp(-x) - 1 + x`: `u (8 exp(-x) + 4 |x| + 4)`; near 0 that exceeds the value
- a sum of `n` terms: `h u` times the sum of their magnitudes, `h` the height of the tree that adds them
- a function of `d` with kinks, such as a clipped loss: the largest change that `d` moved by its error makes
- log-softmax of logits `z` with errors `e`: `e_y + sum_v p_v e_v` and the rounding of its own sum
"""

import math

import numpy as np

UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
EXP = 4.0
# Products, quotients and constants of one loss per token: at most this many roundings.
PRODUCTS = 12.0


def tree_height(terms: int) -> int:
    """Returns the longest chain of additions in a sum of so many terms.

    PyTorch, XLA and GPUs add in blocks; the longest blocks are blocks of PyTorch on CPU, four levels of
    `max(16, terms^(1/4))` terms. A sum of fewer terms than that is taken as one chain.
    """
    block = 2 ** max(4, math.ceil(math.log2(max(terms, 2)) / 4))
    return max(min(terms, 4 * block), 1)


def accumulator(unit: float) -> float:
    """Returns the unit roundoff of the sums of a dtype: that of float32 for narrower ones, as in all their kernels."""
    return min(unit, UNITS["float32"])


def narrowest_dtype(values: np.ndarray) -> str:
    """Returns the narrowest dtype that holds the significant bits of every finite number."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    if finite.size == 0:
        return "float32"
    for dtype in ("bfloat16", "float16", "float32"):
        if (round_to(finite, dtype) == finite).all():
            return dtype
    return "float64"


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds to the significant bits of a dtype, ties to even; its exponent range is not applied."""
    if dtype == "float64":
        return values
    mantissa, exponent = np.frexp(values)
    scale = 2.0 ** SIGNIFICANT_BITS[dtype]
    return np.ldexp(np.round(mantissa * scale) / scale, exponent)
