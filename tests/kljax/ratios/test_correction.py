"""`correct_rollout` against the pipelines of the systems, written out in numpy."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import other_seeds
from tests.masks import MASK, draw

NOISE, DRIFT, LOSS = draw(1.0, 0.5, 1.0)
LP = -0.05 - abs(NOISE)
ROLLOUT = np.minimum(LP + DRIFT, -0.01)
D = LP - ROLLOUT
N = MASK.sum(-1, keepdims=True)

step = functools.partial


def corrected(steps: Sequence[Callable[..., jax.Array]]) -> kljax.RolloutCorrection:
    return kljax.correct_rollout(np.where(MASK, LP, np.nan), np.where(MASK, ROLLOUT, np.inf), MASK, steps=steps)


def check(steps: Sequence[Callable[..., jax.Array]], weights: np.ndarray, kept: np.ndarray) -> None:
    got = corrected(steps)
    np.testing.assert_array_equal(got.kept, kept)
    np.testing.assert_allclose(got.weights, np.where(kept, weights, 0), 1e-13)
    assert other_seeds.shown(kept.any())
    assert kept.sum() <= MASK.sum()


def total(mask: np.ndarray) -> np.ndarray:
    """The log-ratio of each row over the tokens of a mask, `[B, 1]`."""
    return np.where(mask, D, 0).sum(-1, keepdims=True)


def test_empty_correction_changes_nothing() -> None:
    check([], np.ones(MASK.shape), MASK)


def test_skyrl_vetoes_masks_tokens_weighs_and_masks_sequences() -> None:
    """Weights and sequence mask see the tokens that are left."""
    r = np.exp(D)
    selected = MASK & ~(MASK & ((r < 0.3) | (r > 3))).any(-1, keepdims=True)
    selected &= (r >= 0.6) & (r <= 1.6)
    weights = np.minimum(np.exp(np.clip(total(selected), -20, 20)), 1.5) * np.ones(MASK.shape)
    geometric = np.exp(total(selected) / np.maximum(selected.sum(-1, keepdims=True), 1))
    last = selected & (geometric >= 0.8) & (geometric <= 1.25)
    assert other_seeds.shown(last.sum() < selected.sum() < MASK.sum())
    steps = [
        step(kljax.veto_mask, min_ratio=0.3, max_ratio=3.0),
        step(kljax.rejection_mask, lower=0.6, upper=1.6),
        step(kljax.importance_weights, level="sequence", upper=1.5, log_ratio_clip=20.0),
        step(kljax.rejection_mask, level="geometric", lower=0.8, upper=1.25),
    ]
    check(steps, weights, last)
    # In another order the weights are those of other tokens.
    other = corrected([steps[2], *steps[:2], steps[3]])
    assert other_seeds.shown(not np.allclose(other.weights, np.where(last, weights, 0)))


def test_verl_weighs_then_rejects_by_original_mask_statistics() -> None:
    weights = np.minimum(np.exp(np.clip(D, -20, 20)), 1.5)
    weights = weights / weights[MASK].mean()
    k3 = np.exp(D) - 1 - D
    selected = MASK & (1 / np.exp(D) >= 0.5) & (1 / np.exp(D) <= 1.8)
    selected &= np.where(MASK, k3, 0).sum(-1, keepdims=True) / np.maximum(N, 1) <= 0.15
    options = {"log_ratio_clip": 20.0}
    token_k1 = step(kljax.kl_rejection_mask, lower=np.log(0.5), upper=np.log(1.8), **options)
    seq_mean_k3 = step(kljax.kl_rejection_mask, estimator="k3", reduction="mean", upper=0.15, **options)
    weigh = step(kljax.importance_weights, upper=1.5, normalize="tokens", **options)
    check([weigh, lambda *x: token_k1(*x) & seq_mean_k3(*x)], weights, selected)
    # As two steps the second sees fewer tokens.
    in_two_steps = np.asarray(corrected([weigh, token_k1, seq_mean_k3]).kept)
    assert other_seeds.shown((in_two_steps != selected).any())


def test_slime_rejects_and_weighs_with_the_original_mask() -> None:
    r = np.exp(D)
    geometric = np.exp(total(MASK) / np.maximum(N, 1))
    vetoed = (MASK & (r < 0.4)).any(-1, keepdims=True)
    selected = MASK & (geometric >= 0.8) & (geometric <= 1.25) & ~vetoed

    def all_at_once(lp: jax.Array, rollout: jax.Array, mask: jax.Array) -> jax.Array:
        near = kljax.rejection_mask(lp, rollout, mask, level="geometric", lower=0.8, upper=1.25)
        return near & kljax.veto_mask(lp, rollout, mask, min_ratio=0.4)

    weigh = step(kljax.importance_weights, mode="clip", lower=0.7, upper=1.5, log_ratio_clip=20.0)
    check([weigh, all_at_once], np.clip(r, 0.7, 1.5), selected)


@pytest.mark.parametrize("divergence", [None, "tv", "kl"])
def test_openrlhf_gates_sequences_with_unbounded_weights(divergence: str | None) -> None:
    mu, pi = np.exp(ROLLOUT), np.exp(LP)
    kl = mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi))
    if divergence is None:
        geometric = np.exp(total(MASK) / np.maximum(N, 1))
        near = (geometric >= 0.9) & (geometric <= 1.2)
        gate = step(kljax.rejection_mask, level="geometric", lower=0.9, upper=1.2)
    else:
        apart = np.where(MASK, abs(mu - pi) if divergence == "tv" else kl, 0).sum(-1, keepdims=True) / np.maximum(N, 1)
        bound = np.sort(apart[:, 0])[3] + 1e-9
        near = apart <= bound
        gate = step(kljax.divergence_mask, divergence=divergence, level="sequence", max_divergence=bound)
    check([gate, kljax.importance_weights], np.exp(D), MASK & near)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trl_truncates_or_masks_without_rejecting(level: str) -> None:
    r = np.exp(D if level == "token" else np.broadcast_to(total(MASK), MASK.shape))
    check([step(kljax.importance_weights, level=level, upper=1.4)], np.minimum(r, 1.4), MASK)
    icepop = step(kljax.importance_weights, level=level, mode="mask", upper=1.4)
    check([icepop], np.where(r <= 1.4, r, 0), MASK)


def test_the_caller_chooses_the_denominator() -> None:
    got = corrected([step(kljax.rejection_mask, upper=1.2), step(kljax.importance_weights, upper=2.0)])
    loss = np.where(MASK, LOSS * got.weights, 0)
    selected = np.asarray(got.kept)
    assert selected.sum() < MASK.sum()
    same = (loss * kljax.token_weights(MASK, mode="token_mean")).sum()
    np.testing.assert_allclose(same, loss.sum() / MASK.sum(), 1e-13)
    fewer = (loss * kljax.token_weights(got.kept, mode="token_mean")).sum()
    np.testing.assert_allclose(fewer, loss.sum() / selected.sum(), 1e-13)


def test_weights_are_constants() -> None:
    steps = [step(kljax.veto_mask, min_ratio=0.3), step(kljax.importance_weights, upper=1.5)]

    def total(lp: jax.Array) -> jax.Array:
        return kljax.correct_rollout(lp, ROLLOUT, MASK, steps=steps).weights.sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.asarray(LP)), 0)


def test_an_infinite_weight_times_a_zero_is_zero() -> None:
    lp, rollout = jnp.array([[200.0, -1.0]], jnp.float32), jnp.zeros((1, 2), jnp.float32)
    steps = [kljax.importance_weights, step(kljax.importance_weights, mode="mask", upper=2.0)]
    got = kljax.correct_rollout(lp, rollout, jnp.ones((1, 2), bool), steps=steps)
    np.testing.assert_allclose(got.weights, [[0, np.exp(-2)]], 1e-6)
    assert got.kept.all()
    rejected = kljax.correct_rollout(
        lp, rollout, jnp.ones((1, 2), bool), steps=[steps[0], step(kljax.rejection_mask, upper=2.0)]
    )
    np.testing.assert_allclose(rejected.weights, [[0, np.exp(-1)]], 1e-6)


def test_errors_name_the_step() -> None:
    with pytest.raises(TypeError, match=r"steps\[1\]: got dtype int"):
        corrected([kljax.importance_weights, lambda lp, rollout, mask: mask.astype(int)])
    with pytest.raises(ValueError, match=r"result of steps\[0\] \[6\]"):
        corrected([kljax.sequence_ratios])
