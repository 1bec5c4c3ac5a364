"""A test whether sampled tokens are draws of the distribution that their log-probs are of."""

import math

import jax.numpy as jnp

import kljax
from train.rl.kl_metrics import SAMPLING_BIAS, SAMPLING_BIAS_Z
from train.rl.metrics import Metrics, ZScore
from train.sequences.batch import Batch, required

MOST_WEIGHT = 5.0
"""Bound of the ratio of policy to sampler, as one token must not decide. A lower one would itself be a bias."""
ROUNDING = 0.01
"""Nats of log-prob and entropy of a token that rounding may explain; in float32 it is below a hundredth of them."""


def measure_sampling_bias(stats: kljax.TokenStats, batch: Batch, vocab_size: int) -> Metrics:
    """Measures whether tokens are as probable as draws of the policy p: `E[log p + H(p)] = 0` at each prefix.

    A draw of a sampler q counts `w = p / q` times, with the recorded log-prob for q: a sampler that differs from the
    policy, and says so, has no bias. The sum of `d = w (log p + H)` gets the variance `sum (d**2 + 2 v) / 3`, so that
    large z are rarer than in a normal distribution. Here v bounds the variance of `log p` in a vocabulary of V
    tokens by the entropy H: `v = k H (1 + k / e**5)` with `k = log(V / H) + 5`.

    Args:
      stats: of the policy, [B, T], with entropies over the whole vocabulary, at the temperature of the sampler.
      batch: the completion mask, and log-probs of the sampler if they are recorded.
      vocab_size: V.

    References:
      Delyon, "Exponential inequalities for sums of weakly dependent variables" (2009).
    """
    mask = batch.completion_mask
    entropy = jnp.maximum(required(stats.entropy), jnp.finfo(jnp.float32).tiny)
    surplus = stats.log_prob + entropy
    if batch.rollout_log_probs is not None:
        log_ratio = kljax.masked(stats.log_prob - batch.rollout_log_probs, mask)
        surplus *= jnp.exp(jnp.minimum(log_ratio, math.log(MOST_WEIGHT)))
    nats = math.log(vocab_size) - jnp.log(entropy) + 5
    bound = nats * entropy * (1 + nats * math.exp(-5))
    variance = (jnp.square(surplus) + 2 * bound) / 3 + ROUNDING**2
    return {
        SAMPLING_BIAS: kljax.WeightedSum.of(surplus, mask),
        SAMPLING_BIAS_Z: ZScore.of(surplus, variance, mask),
    }
