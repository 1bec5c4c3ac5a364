import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, check_masked, draw

LP, OTHER, SAMPLING = draw(1.0, 1.0, 1.0)
X = np.where(MASK, LP - OTHER, 0)
VALUES = {"k1": X, "abs": abs(X), "k2": X * X / 2, "k3": np.exp(-X) - 1 + X}
GRADIENTS = {"k1": np.ones_like(X), "abs": np.sign(X), "k2": X, "k3": 1 - np.exp(-X)}


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_rollout_kl_value_and_gradient(estimator: str) -> None:
    def loss(lp: jax.Array) -> jax.Array:
        return kljax.rollout_kl_loss(lp, OTHER, MASK, estimator=estimator)

    np.testing.assert_allclose(loss(LP), VALUES[estimator], 1e-12, 1e-14)
    grad = jax.grad(lambda lp: loss(lp).sum())(jnp.asarray(LP))
    np.testing.assert_allclose(grad, np.where(MASK, GRADIENTS[estimator], 0), 1e-12, 1e-14)
    check_masked(lambda lp, rollout: kljax.rollout_kl_loss(lp, rollout, MASK, estimator=estimator), [LP, OTHER])


def test_rollout_kl_takes_reference_kl_names_and_clips() -> None:
    def loss(lp: jax.Array, **options: object) -> jax.Array:
        return kljax.rollout_kl_loss(lp, OTHER, MASK, **options)

    clipped = np.where(abs(X) < 0.8, X, 0.8 * np.sign(X))
    np.testing.assert_allclose(loss(LP, estimator="k1", log_ratio_clip=0.8), clipped, 1e-12, 1e-14)
    np.testing.assert_allclose(loss(LP, estimator="k3", value_clip=0.1), np.minimum(VALUES["k3"], 0.1), 1e-12, 1e-14)
    np.testing.assert_allclose(loss(LP, estimator="low_var_kl"), np.minimum(VALUES["k3"], 10), 1e-12, 1e-14)
    np.testing.assert_array_equal(loss(LP, estimator="none"), 0)
    for gradient, expected in (("k2", X), ("none", 0 * X), ("value", GRADIENTS["k3"] * MASK)):
        options = {"estimator": "k3", "gradient": gradient}
        np.testing.assert_allclose(loss(LP, **options), VALUES["k3"], 1e-12, 1e-14)
        grad = jax.grad(lambda lp, options=options: loss(lp, **options).sum())(jnp.asarray(LP))
        np.testing.assert_allclose(grad, expected, 1e-12, 1e-14)


def test_rollout_kl_is_k2_by_default() -> None:
    np.testing.assert_allclose(kljax.rollout_kl_loss(LP, OTHER, MASK), VALUES["k2"], 1e-12, 1e-14)


def test_reference_kl_defaults_to_k3_with_k2_gradient() -> None:
    np.testing.assert_allclose(kljax.reference_kl_loss(LP, OTHER, MASK), VALUES["k3"], 1e-12, 1e-14)
    grad = jax.grad(lambda lp: kljax.reference_kl_loss(lp, OTHER, MASK).sum())(jnp.asarray(LP))
    np.testing.assert_allclose(grad, X, 1e-12, 1e-14)
    check_masked(lambda lp, ref: kljax.reference_kl_loss(lp, ref, MASK), [LP, OTHER])


def test_reference_kl_passes_every_argument_on() -> None:
    options = {"estimator": "k3", "gradient": "value", "max_ratio": 1.2, "log_ratio_clip": 0.8, "value_clip": 0.5}

    def loss(lp: jax.Array) -> jax.Array:
        return kljax.reference_kl_loss(lp, OTHER, MASK, sampling_log_probs=SAMPLING, **options)

    def expected(lp: jax.Array) -> jax.Array:
        return kljax.estimate_kl(lp, OTHER, MASK, sampling_log_probs=SAMPLING, **options)

    np.testing.assert_array_equal(loss(LP), expected(LP))
    for name in ("max_ratio", "log_ratio_clip", "value_clip"):
        changed = kljax.reference_kl_loss(LP, OTHER, MASK, sampling_log_probs=SAMPLING, **{**options, name: 0.1})
        assert not np.array_equal(changed, expected(LP))
    grads = [jax.grad(lambda lp, f=f: f(lp).sum())(jnp.asarray(LP)) for f in (loss, expected)]
    np.testing.assert_array_equal(*grads)


def test_k1_value_gradient_is_refused_without_importance_correction() -> None:
    with pytest.raises(ValueError, match=r"gradient: got 'value' with estimator 'k1'.*expectation.*is zero"):
        kljax.reference_kl_loss(LP, OTHER, MASK, estimator="k1", gradient="value")
    kljax.reference_kl_loss(LP, OTHER, MASK, estimator="k1", gradient="k2")
    corrected = {"estimator": "k1", "gradient": "value", "sampling_log_probs": LP}
    grad = jax.grad(lambda lp: kljax.reference_kl_loss(lp, OTHER, MASK, **corrected).sum())(jnp.asarray(LP))
    np.testing.assert_allclose(grad, np.where(MASK, X + 1, 0), 1e-12)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"estimator: got 'k5', expected one of none, k1, abs, k2, k3, low_var_kl"):
        kljax.rollout_kl_loss(LP, OTHER, MASK, estimator="k5")
    with pytest.raises(ValueError, match="value_clip: got 0"):
        kljax.rollout_kl_loss(LP, OTHER, MASK, value_clip=0)
    with pytest.raises(ValueError, match="estimator: got 'k4'"):
        kljax.reference_kl_loss(LP, OTHER, MASK, estimator="k4")
    with pytest.raises(ValueError, match="shapes differ"):
        kljax.rollout_kl_loss(LP, OTHER[1:], MASK)
