"""Float32 results that are equal but for rounding: compared by norm, within a bound counted from the operations.

Single values say little. Where terms cancel, one rounding changes every digit of a small element, and which elements
these are depends on the CPU: on its fused multiply-adds, its vector width and the order of its sums. The norm of the
difference, relative to the norm of the result, depends on the number of roundings alone. `docs/numerics.md` has both.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

UNIT = 2.0**-24
"""The largest relative error of one rounding to float32."""


def of_sum(terms: int) -> float:
    """Returns the units that a sum of so many terms of either sign leaves by norm, at least one.

    Partial sum `k` is `sqrt(k)` terms large and its rounding `1 / sqrt(3)` of a unit in the mean square. All of them,
    relative to the `sqrt(terms)` of the whole, are `sqrt(terms / 6)` units.
    """
    return max(1.0, math.sqrt(terms / 6))


def of_decoder(*, layers: int, longest_sum: int, passes: int = 1) -> float:
    """Returns the units by which two programs may differ in the log-probs of a decoder, or in their gradient.

    A layer has ten operations in a row: two norms, the products with q or k, the scores, the softmax, the values and
    the output, and the three of the MLP; the embedding, the last norm and the head are three more. Their roundings are
    independent, so their squares add up. The factor 2 is for the two programs and for what the layers amplify.

    Args:
      layers: of the decoder.
      longest_sum: the terms of the longest of these sums.
      passes: 1 for log-probs; 3 for a gradient, whose cotangents pass every operation once more, and whose weight
        gradients are products of both.
    """
    return 2 * math.sqrt(passes * (10 * layers + 3)) * of_sum(longest_sum)


def of_weights(function: Callable[[Any], Any], weights: Any, *, longest_sum: int) -> float:
    """Returns the units by which two programs of a function may differ: measured, where its layers amplify roundings.

    All weights move by a random unit, sixteen times; the mean square of the movement of the result has each product
    once. The norms, softmaxes and activations between them double the operations, and two programs double them again.
    The factor 2 that is left is for the direction of a rounding, which movements of weights show in the mean alone.

    Args:
      function: from a tree of weights to a tree of arrays.
      weights: a tree of float32 arrays.
      longest_sum: the terms of the longest sum.
    """
    # The movement is linear at this size and large compared with the roundings of the function itself.
    size, rng, expected = 2.0**-12, np.random.default_rng(0), function(weights)
    squares = []
    for _ in range(16):
        moved = jax.tree.map(lambda leaf: leaf * (1 + size * rng.standard_normal(leaf.shape, np.float32)), weights)
        difference = jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, function(moved), expected)
        squares.append((norm(difference) / norm(expected) / size) ** 2)
    return 4 * of_sum(longest_sum) * math.sqrt(np.mean(squares))


def norm(tree: Any) -> float:
    """Returns the L2 norm of all values of a tree."""
    return math.sqrt(sum(float(np.square(np.asarray(leaf, np.float64)).sum()) for leaf in jax.tree.leaves(tree)))


def assert_close_by_norm(actual: Any, expected: Any, *, roundings: float, scale: float | None = None) -> None:
    """Compares two trees of arrays by the norm of their difference.

    Args:
      actual: a tree of finite arrays.
      expected: one of the same structure and shapes.
      roundings: the largest norm of the difference that is allowed, in units of `2**-24` of the scale.
      scale: the norm of the numbers that were rounded, where they are not those of `expected`: of the terms of a
        difference, for one.

    Raises:
      AssertionError: the structures or shapes differ, a value is not finite, or the norm is larger.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (actual, expected)]
    assert shapes[0] == shapes[1], shapes
    differences = jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), actual, expected)
    result, scale = norm(differences), norm(expected) if scale is None else scale
    assert result <= roundings * UNIT * scale, (
        f"the difference is {result / (UNIT * scale or 1):.3g} roundings of the norm, the bound {roundings:.3g}"
    )


def planted(tree: Any, *, roundings: float, scale: float | None = None) -> Any:
    """Returns a tree at a distance of so many units of the scale, the error in the largest value of its first leaf."""
    leaves, structure = jax.tree.flatten(tree)
    first = np.array(leaves[0], np.float64)
    first.flat[np.abs(first).argmax()] += roundings * UNIT * (norm(tree) if scale is None else scale)
    return jax.tree.unflatten(structure, [first, *leaves[1:]])
