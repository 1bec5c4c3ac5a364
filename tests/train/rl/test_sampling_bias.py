"""Sampled tokens against the entropies of the policy: no alarm for its draws, one for those of another distribution."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.config.plan import Plan
from train.rl.sampling_bias import measure_sampling_bias
from train.run.rollout_watch import BIASED_STEPS, MOST_BIAS
from train.sequences.batch import Batch

ROWS, LENGTH, VOCABULARY = 32, 64, 128
measure = jax.jit(measure_sampling_bias, static_argnums=2)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class Toy:
    """A bigram model with a bonus for tokens that were there before, as language models have it."""

    def __init__(self, scale: float, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        # Uneven contexts: some nearly certain, some open.
        scales = scale * self.random.uniform(0.3, 2, (VOCABULARY, 1))
        self.table = self.random.normal(size=(VOCABULARY, VOCABULARY)) * scales + 2 * scale

    def step(
        self, *, penalty: float = 1.0, temperature: float = 1.0, noise: float = 0.0
    ) -> tuple[kljax.TokenStats, Batch]:
        """Draws rows; returns their statistics under the policy, and a batch with log-probs of the sampler."""
        last, seen = self.random.integers(VOCABULARY, size=ROWS), np.zeros((ROWS, VOCABULARY), bool)
        rows, log_probs, entropies, recorded = np.arange(ROWS), [], [], []
        for _ in range(LENGTH):
            seen[rows, last] = True
            logits = self.table[last] + 1.0 * seen
            policy = log_softmax(logits)
            sampler = logits + noise * self.random.normal(size=logits.shape)
            sampler_log_probs = log_softmax(sampler)
            drawn = np.where(seen, np.where(sampler > 0, sampler / penalty, sampler * penalty), sampler) / temperature
            masses = np.exp(log_softmax(drawn)).cumsum(-1)
            last = (masses < self.random.random((ROWS, 1)) * masses[:, -1:]).sum(-1)
            log_probs.append(policy[rows, last])
            recorded.append(sampler_log_probs[rows, last])
            entropies.append(-(np.exp(policy) * policy).sum(-1))
        per_token = (jnp.asarray(np.stack(x, 1), jnp.float32) for x in (log_probs, entropies, recorded))
        log_prob, entropy, rollout_log_probs = per_token
        mask = jnp.ones((ROWS, LENGTH), bool)
        stats = dataclasses.replace(kljax.TokenStats(log_prob), entropy=entropy)
        return stats, Batch(jnp.zeros((ROWS, LENGTH), jnp.int32), mask, mask, rollout_log_probs=rollout_log_probs)


def scores(toy: Toy, steps: int, **flaws: float) -> np.ndarray:
    """The z-scores of so many steps."""
    return np.array([float(measure(*toy.step(**flaws), VOCABULARY)["sampling_bias_z"].value()) for _ in range(steps)])


def windows(z: np.ndarray) -> np.ndarray:
    """Sums of the last steps in standard deviations, as the watch has them."""
    return np.convolve(z, np.ones(BIASED_STEPS), "valid") / math.sqrt(BIASED_STEPS)


@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_draws_of_the_policy_give_no_alarm(scale):
    """In 1,000 steps together: open, ordinary and nearly certain distributions."""
    z = scores(Toy(scale, seed=1), 334)
    assert np.abs(z).max() < 3
    assert np.abs(windows(z)).max() < 3
    assert abs(z.mean()) < 4 * z.std() / math.sqrt(len(z))


@pytest.mark.parametrize(
    ("flaw", "sign"), [({"penalty": 1.1}, -1), ({"temperature": 0.7}, 1), ({"temperature": 1.3}, -1)]
)
def test_another_distribution_is_found_within_a_window(flaw, sign):
    """A penalty of 1.1, although the log-probs of the sampler are those of the policy."""
    toy = Toy(3.0, seed=2)
    stats, batch = toy.step(**flaw)
    np.testing.assert_allclose(stats.log_prob, batch.rollout_log_probs, atol=1e-5)
    z = scores(toy, BIASED_STEPS, **flaw)
    assert sign * windows(z)[0] > MOST_BIAS


def test_recorded_log_probs_make_up_for_another_sampler():
    """As with another dtype: the ratios of its own log-probs make up for it; without them it shows."""
    toy = Toy(3.0, seed=3)
    weighted, unweighted = [], []
    for _ in range(100):
        stats, batch = toy.step(noise=0.8)
        for numbers, part in ((weighted, batch), (unweighted, dataclasses.replace(batch, rollout_log_probs=None))):
            numbers.append(float(measure(stats, part, VOCABULARY)["sampling_bias_z"].value()))
    assert np.abs(windows(np.array(weighted))).max() < 2
    assert windows(np.array(unweighted)).max() < -2


@pytest.mark.parametrize("rare", [1e-2, 1e-4, 1e-6, 1e-8, 1e-12])
def test_nearly_certain_tokens_give_no_alarm(rare):
    """No rare token comes up, so that all surpluses have one sign, and their squares are far below the variance."""
    tokens = 10**6
    entropy = -((1 - rare) * math.log1p(-rare) + rare * math.log(rare / (VOCABULARY - 1)))
    shape = (1, tokens)
    stats = kljax.TokenStats(jnp.full(shape, np.float32(math.log1p(-rare))), jnp.full(shape, np.float32(entropy)))
    mask = jnp.ones(shape, bool)
    batch = Batch(jnp.zeros(shape, jnp.int32), mask, mask)
    count = min(tokens, int(1 / rare))  # with a chance of 1 / e there is none among so many
    part = dataclasses.replace(batch, completion_mask=jnp.arange(tokens)[None] < count)
    assert abs(float(measure(stats, part, VOCABULARY)["sampling_bias_z"].value())) < 1.5


@pytest.mark.parametrize("size", [4, 128, 150_000])
def test_variance_of_log_probs_is_below_its_bound(size):
    """The most variable distributions have two values: one token, or all but one, share what is left."""
    for rare in np.logspace(-14, -0.31, 60):
        for others in (1, size - 1):
            masses = np.array([1 - rare, rare / others])
            counts, logs = np.array([1, others]), np.log(masses)
            entropy = -(counts * masses * logs).sum()
            nats = math.log(size / entropy) + 5
            assert (counts * masses * logs**2).sum() < nats * entropy * (1 + nats * math.exp(-5))


def test_bias_does_not_depend_on_the_split():
    stats, batch = Toy(3.0, seed=4).step()
    expected = measure(stats, batch, VOCABULARY)

    def part(rows: slice) -> dict:
        return measure(*jax.tree.map(lambda x: x[rows], (stats, batch)), VOCABULARY)

    parts = part(slice(0, 5)), part(slice(5, 32))
    for name, metric in expected.items():
        merged = parts[0][name] + parts[1][name]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), parts[1][name], parts[0][name]).reduce()
        for other in (merged, stacked):
            np.testing.assert_allclose(other.value(), metric.value(), rtol=1e-4)


def test_masked_tokens_and_empty_batches_count_nothing():
    stats, batch = Toy(3.0, seed=5).step()
    half = batch.completion_mask.at[:, 32:].set(False)
    broken = dataclasses.replace(stats, log_prob=stats.log_prob.at[:, 40].set(jnp.nan))
    metrics = measure(broken, dataclasses.replace(batch, completion_mask=half), VOCABULARY)
    expected = measure(*jax.tree.map(lambda x: x[:, :32], (stats, batch)), VOCABULARY)
    for name, metric in metrics.items():
        np.testing.assert_allclose(metric.value(), expected[name].value(), rtol=1e-5)
    empty = measure(stats, dataclasses.replace(batch, completion_mask=jnp.zeros_like(half)), VOCABULARY)
    assert [float(metric.value()) for metric in empty.values()] == [0, 0]


SERVER = "rollout.source={{type: openai, url: 'http://host', model: m{}}}"
SHARED = functools.partial(str.format, SERVER)


@pytest.mark.parametrize(
    ("overrides", "recorded", "expected"),
    [
        ((), True, True),
        ((), False, True),
        (("rollout.top_k=5",), True, False),
        (("rollout.top_k=5", "rollout.record_kept_tokens=true"), True, False),
        (("rollout.top_p=0.9",), True, False),
        (("rollout.min_p=0.1",), True, False),
        (("rollout.policy_lag=1",), True, True),
        (("rollout.policy_lag=1",), False, False),
        ((SHARED(""),), False, True),
        ((SHARED(""), "rollout.ahead=1"), False, False),
        ((SHARED(""), "rollout.ahead=1"), True, True),
        ((SHARED(", sync: none"),), True, False),
    ],
)
def test_bias_needs_draws_of_the_policy(overrides, recorded, expected):
    """Entropies are of the whole vocabulary; weights that nobody syncs, and recordings, are of any policy."""
    lora = ("lora={rank: 2}",) if overrides and "openai" in overrides[0] else ()
    assert Plan.of(tiny.config_of(*overrides, *lora)).measures_sampling_bias(recorded=recorded) == expected
