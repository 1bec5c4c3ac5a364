"""The audit by brute force: every sequence of a tiny vocabulary, with its probability, its estimate and its gradient.

In numpy and float64, with the estimators written out: nothing here calls the library.
"""

import itertools
from collections.abc import Callable

import numpy as np

# Value and derivative by the log-prob, as functions of x = log pi - log ref.
FORMULAS: dict[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]] = {
    "k1": (lambda x: x, np.ones_like),
    "abs": (np.abs, np.sign),
    "k2": (lambda x: x**2 / 2, lambda x: x),
    "k3": (lambda x: np.exp(-x) - 1 + x, lambda x: 1 - np.exp(-x)),
}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probs over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def at(table: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray:
    """`[T]` entries of a `[T, V]` table at the tokens of a sequence."""
    return table[np.arange(len(tokens)), list(tokens)]


def value_and_slope(
    estimator: str, x: np.ndarray, log_weight: np.ndarray, cap: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Corrected value, its derivative by the log-prob and the weight; no cap at all means no correction."""
    value, slope = (formula(x) for formula in FORMULAS[estimator])
    if cap is None:
        return value, slope, np.ones_like(x)
    weight, inside = np.minimum(np.exp(log_weight), cap), np.exp(log_weight) <= cap
    return weight * value, weight * slope + np.where(inside, weight * value, 0), weight


class Row:
    """One row: `[T, V]` logits of the policy, the reference and the policy that draws the tokens."""

    def __init__(self, logits: np.ndarray, ref: np.ndarray, behaviour: np.ndarray) -> None:
        self.policy, self.ref, self.behaviour = map(log_softmax, (logits, ref, behaviour))
        length, vocabulary = logits.shape
        self.sequences = list(itertools.product(range(vocabulary), repeat=length))
        self.probabilities = np.array([np.exp(at(self.behaviour, s).sum()) for s in self.sequences])
        under_policy = np.array([np.exp(at(self.policy, s).sum()) for s in self.sequences])
        log_ratios = np.array([at(self.policy - self.ref, s).sum() for s in self.sequences])
        self.kl = float((under_policy * log_ratios).sum())
        # The score of the whole sequence times its log-ratio: the gradient of the sequence's KL.
        scores = np.array([self.scores(s) for s in self.sequences])
        self.gradient = np.einsum("s,s,stv->tv", under_policy, log_ratios, scores)

    def scores(self, tokens: tuple[int, ...]) -> np.ndarray:
        """`[T, V]` derivative of each token's log-prob by the logits of its position."""
        return np.eye(self.policy.shape[-1])[list(tokens)] - np.exp(self.policy)

    def estimates(self, estimator: str, cap: float | None) -> np.ndarray:
        """`[S, 3, T]` value, slope and weight of every sequence."""
        return np.array(
            [
                value_and_slope(estimator, at(self.policy - self.ref, s), at(self.policy - self.behaviour, s), cap)
                for s in self.sequences
            ]
        )

    def value(self, estimator: str, cap: float | None) -> tuple[float, float]:
        """Mean and variance of the sum over the sequence."""
        sums = self.estimates(estimator, cap)[:, 0].sum(-1)
        mean = float(self.probabilities @ sums)
        return mean, float(self.probabilities @ (sums - mean) ** 2)

    def coefficients(self, place: str, estimator: str, cap: float | None, mean: float) -> np.ndarray:
        """`[S, T]` what multiplies each token's score; `mean` is the mean estimate of all tokens of the batch."""
        values, slopes, weights = np.moveaxis(self.estimates(estimator, cap), 1, 0)
        if place == "loss":
            return slopes
        if place == "straight_through":
            return weights * np.array([at(self.policy - self.ref, s) for s in self.sequences])
        if place == "advantage":
            return values - weights * mean
        later = np.cumsum(values[:, ::-1], -1)[:, ::-1] - values
        baseline = 0
        if place == "reward_baseline":
            expected = self.probabilities @ values
            baseline = np.cumsum(expected[::-1])[::-1]
        return values + weights * (later - baseline)

    def gradients(self, place: str, estimator: str, cap: float | None, mean: float) -> tuple[np.ndarray, float]:
        """Expected gradient `[T, V]`, and the trace of the covariance of one sequence's gradient."""
        coefficients = self.coefficients(place, estimator, cap, mean)
        each = coefficients[..., None] * np.array([self.scores(s) for s in self.sequences])
        expected = np.einsum("s,stv->tv", self.probabilities, each)
        return expected, float(self.probabilities @ ((each - expected) ** 2).sum((-2, -1)))
