"""Sampled tokens on two meshes or CPUs: equal, until a uniform number lies on the border between two tokens.

A draw takes the token at which the running sum of the probabilities exceeds a uniform number. Rounding moves the
borders between tokens by parts in a million, so once in some thousand rows another token is drawn, and every later
token of that row is another. The rows are compared up to that token, which has to be such a near tie.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import rounding
from train.rollouts.sampler.draw import draw_index, token_uniforms

BORDER = 1e-5
"""How far rounding moves a border, as a share of all probability: the log-probs on either side are equal to 5e-6."""


def first_difference(tokens: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the column [B] of the first token that differs, or the number of columns."""
    differs = np.asarray(tokens) != np.asarray(others)
    return np.where(differs.any(1), differs.argmax(1), differs.shape[1])


def is_near_tie(probs: np.ndarray, uniforms: np.ndarray, tokens: tuple[int, int], border: float = BORDER) -> bool:
    """Says whether both tokens are drawn within `border` of two uniform numbers.

    Args:
      probs: [V], of a token.
      uniforms: [2], the numbers that it was drawn with.
      tokens: the tokens that two programs drew.
      border: how far the numbers are moved.
    """
    # The second number is a place within a chunk, whose share of all probability may be small.
    moves = np.linspace(-border, border, 9)
    around = [np.clip(uniforms + move, 0, 1 - 2**-24) for move in itertools.product(moves, moves)]
    drawn = draw_index(jnp.broadcast_to(jnp.asarray(probs), (len(around), len(probs))), jnp.asarray(np.array(around)))
    return set(tokens) <= set(np.asarray(drawn).tolist())


def assert_same_samples(
    actual: Any,
    expected: Any,
    *,
    key: jax.Array,
    probs_at: Callable[[int, int], np.ndarray],
    roundings: float,
) -> None:
    """Compares samples row by row, to the end or up to the first near tie.

    Args:
      actual: samples, with tokens and completion mask [B, T], prompt lengths [B] and log-probs.
      expected: those of another program.
      key: the random key of both.
      probs_at: a function of row and column, the probabilities [V] of that token given the expected ones before it.
      roundings: by which the log-probs of equal tokens may differ, by norm.
    """
    first = first_difference(actual.tokens, expected.tokens)
    before = np.arange(actual.tokens.shape[1]) < first[:, None]
    for name in ("tokens", "completion_mask"):
        left, other = (np.where(before, np.asarray(getattr(samples, name)), 0) for samples in (actual, expected))
        np.testing.assert_array_equal(left, other, err_msg=name)
    left, other = (
        np.where(before, np.asarray(samples.fields["rollout_log_probs"]), 0) for samples in (actual, expected)
    )
    rounding.assert_close_by_norm(left, other, roundings=roundings)
    for row in np.flatnonzero(first < actual.tokens.shape[1]):
        column = int(first[row])
        pair = int(actual.tokens[row, column]), int(expected.tokens[row, column])
        number = column - int(expected.prompt_lengths[row])
        numbers = np.asarray(token_uniforms(key, jnp.array([row]), number, 1, jnp.float32))[0, 0]
        assert is_near_tie(probs_at(int(row), column), numbers, pair), (
            f"row {row}, token {column}: drew {pair[0]} and {pair[1]}, which is no near tie"
        )
