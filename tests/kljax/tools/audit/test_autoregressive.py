"""An audit at fixed prefixes leaves this out: a token changes the prefixes after it, and with them the later KL.

Every sequence of a tiny autoregressive policy is enumerated, with logits of its own for every prefix.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.kljax.calls import QUICK
from tests.other_seeds import example_key

LENGTH, VOCABULARY = 3, 3
PREFIXES = [prefix for length in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=length)]
SEQUENCES = np.array(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
# `[S, T]`: the row of the table that predicts each token of each sequence.
AT = np.array([[PREFIXES.index(tuple(sequence[:t])) for t in range(LENGTH)] for sequence in SEQUENCES])


def log_probs(table: jax.Array) -> jax.Array:
    """`[S, T]` log-probs of the tokens of every sequence."""
    return jax.nn.log_softmax(table)[AT, SEQUENCES]


def exact_kl(table: jax.Array, ref: jax.Array) -> jax.Array:
    lp = log_probs(table).sum(-1)
    return (jnp.exp(lp) * (lp - log_probs(ref).sum(-1))).sum()


@pytest.fixture(scope="module")
def tables() -> tuple[jax.Array, jax.Array]:
    return tuple(jax.random.normal(example_key(0), (2, len(PREFIXES), VOCABULARY), jnp.float64))


def expected_gradient(table: jax.Array, per_token: object) -> np.ndarray:
    """The gradient of the expectation over sequences, their probabilities held constant, of a sum of token losses."""
    drawn = jax.lax.stop_gradient(jnp.exp(log_probs(table).sum(-1)))
    gradient = jax.grad(lambda z: (drawn[:, None] * per_token(log_probs(z))).sum())
    return np.asarray(jax.jit(gradient, compiler_options=QUICK)(table))


def test_reward_has_the_sequence_kl_gradient_unlike_loss(
    tables: tuple[jax.Array, jax.Array],
) -> None:
    table, ref = tables
    ref_log_probs, mask = log_probs(ref), jnp.ones(SEQUENCES.shape, bool)
    exact = np.asarray(jax.jit(jax.grad(exact_kl), compiler_options=QUICK)(table, ref))

    def loss(lp: jax.Array) -> jax.Array:
        return kljax.reference_kl_loss(lp, ref_log_probs, mask, estimator="k2", gradient="value")

    def reward(lp: jax.Array) -> jax.Array:
        rewards, _ = kljax.kl_shaped_rewards(jnp.zeros(len(SEQUENCES)), lp, ref_log_probs, mask, coef=1.0)
        returns = jnp.flip(jnp.cumsum(jnp.flip(rewards, -1), -1), -1)
        return -jax.lax.stop_gradient(returns) * lp

    np.testing.assert_allclose(expected_gradient(table, reward), exact, rtol=1e-12, atol=1e-14)
    from_loss = expected_gradient(table, loss)
    missing = np.linalg.norm(from_loss - exact) / np.linalg.norm(exact)
    assert missing == pytest.approx(0.506, abs=5e-4), "the number that docs/which-estimator.md quotes"

    # What the loss has instead: at every prefix the gradient of that prefix's own KL, which the audit calls exact.
    log_p, log_q = jax.nn.log_softmax(table), jax.nn.log_softmax(ref)
    kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1, keepdims=True)
    reached = np.zeros(len(PREFIXES))
    for sequence, rows in zip(np.exp(np.asarray(log_probs(table).sum(-1))), AT, strict=True):
        reached[rows] += sequence
    local_kl = reached[:, None] * np.asarray(jnp.exp(log_p) * (log_p - log_q - kl))
    np.testing.assert_allclose(from_loss, local_kl, rtol=1e-12, atol=1e-14)
