import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, draw

LP, REF, BAD, BAD_REF = draw(0.7, 0.7, 0.7, 0.7)
# Rejected sequences have other tokens, and here one position more.
BAD, BAD_REF, BAD_MASK = (np.concatenate([x[::-1], x[:, :1]], axis=1) for x in (BAD, BAD_REF, MASK))


def sums(lp: np.ndarray, ref: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask, lp - ref, 0).sum(-1)


def dpo(lp, ref, bad, bad_ref, **options) -> jax.Array:
    rejected = {"rejected_log_probs": bad, "rejected_ref_log_probs": bad_ref, "rejected_mask": BAD_MASK}
    return kljax.dpo_loss(lp, ref, MASK, **rejected, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_value_and_gradient(smoothing: float) -> None:
    margin = 0.5 * (sums(LP, REF, MASK) - sums(BAD, BAD_REF, BAD_MASK))
    wins = 1 / (1 + np.exp(-margin))

    @jax.jit
    def value_and_grads(*pair: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        options = {"coef": 0.5, "label_smoothing": smoothing}
        value, pull = jax.vjp(lambda lp, bad: dpo(lp, REF, bad, BAD_REF, **options), *pair)
        return value, pull(jnp.ones_like(value))

    value, (grad, bad_grad) = value_and_grads(LP, BAD)
    np.testing.assert_allclose(value, -(1 - smoothing) * np.log(wins) - smoothing * np.log(1 - wins), 1e-12)
    slope = -0.5 * ((1 - smoothing) * (1 - wins) - smoothing * wins)[:, None]
    np.testing.assert_allclose(grad, np.where(MASK, slope, 0), 1e-11, 1e-14)
    np.testing.assert_allclose(bad_grad, np.where(BAD_MASK, -slope, 0), 1e-11, 1e-14)


@pytest.mark.parametrize("drift", [-200.0, 200.0])
def test_far_log_ratios_give_a_linear_loss(drift: float) -> None:
    ref, mask = np.full((1, 2), -1.0, np.float32), np.ones((1, 2), bool)
    rejected = {"rejected_log_probs": ref, "rejected_ref_log_probs": ref, "rejected_mask": mask}
    total = jax.jit(jax.value_and_grad(lambda lp: kljax.dpo_loss(lp, ref, mask, **rejected, coef=1.0).sum()))
    value, grad = total(ref + np.float32(drift))
    np.testing.assert_allclose(value, max(-2 * drift, 0.0), atol=1e-30)
    np.testing.assert_allclose(grad, -float(drift < 0), atol=1e-30)


# What one token of either sequence has under the policy and the reference -> the margin.
IMPOSSIBLE = {
    "preferred, under the reference": ((-1.0, -np.inf, -1.0, -1.0), np.inf),
    "preferred, under the policy": ((-np.inf, -1.0, -1.0, -1.0), -np.inf),
    "rejected, under the reference": ((-1.0, -1.0, -1.0, -np.inf), -np.inf),
    "rejected, under the policy": ((-1.0, -1.0, -np.inf, -1.0), np.inf),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_token_makes_the_margin_infinite(case: str, smoothing: float, dtype: type) -> None:
    log_probs, margin = IMPOSSIBLE[case]
    lp, ref, bad, bad_ref = (jnp.asarray([[x, -2.0]], dtype) for x in log_probs)
    mask = jnp.ones((1, 2), bool)

    def loss(lp: jax.Array, bad: jax.Array) -> jax.Array:
        rejected = {"rejected_log_probs": bad, "rejected_ref_log_probs": bad_ref, "rejected_mask": mask}
        return kljax.dpo_loss(lp, ref, mask, **rejected, coef=0.5, label_smoothing=smoothing).sum()

    value, (slope, bad_slope) = jax.value_and_grad(loss, (0, 1))(lp, bad)
    # The label that the margin denies has a loss without bound, if it has a probability at all.
    assert value == (np.inf if smoothing > 0 or margin < 0 else 0)
    expected = 0.5 * smoothing if margin > 0 else -0.5 * (1 - smoothing)
    np.testing.assert_allclose(slope, np.full((1, 2), expected), 1e-6)
    np.testing.assert_allclose(bad_slope, np.full((1, 2), -expected), 1e-6)


def test_trinity_sums_the_pairs_of_a_batch() -> None:
    margin = 0.1 * (sums(LP, REF, MASK) - sums(BAD, BAD_REF, BAD_MASK)).sum()
    names = ("rejected_log_probs", "rejected_ref_log_probs", "rejected_mask")
    joined = [x.reshape(1, -1) for x in (LP, REF, MASK, BAD, BAD_REF, BAD_MASK)]
    loss = kljax.dpo_loss(*joined[:3], **dict(zip(names, joined[3:], strict=True)), coef=0.1)
    np.testing.assert_allclose(loss, [np.log1p(np.exp(-margin))], 1e-12)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"rejected_log_probs: got shape \[5, 8\], expected the rows of log_probs"):
        kljax.dpo_loss(
            LP, REF, MASK, rejected_log_probs=BAD[1:], rejected_ref_log_probs=BAD_REF[1:], rejected_mask=BAD_MASK[1:]
        )
    with pytest.raises(ValueError, match="shapes differ: rejected_log_probs"):
        dpo(LP, REF, BAD[:, 1:], BAD_REF)
    with pytest.raises(ValueError, match="coef: got 0"):
        dpo(LP, REF, BAD, BAD_REF, coef=0)
    with pytest.raises(ValueError, match="label_smoothing: got -1"):
        dpo(LP, REF, BAD, BAD_REF, label_smoothing=-1)
