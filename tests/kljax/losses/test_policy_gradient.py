import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import other_seeds
from tests.kljax.losses.pointwise import ADV, LP, MASK, OLD, D, R, check_far, check_pointwise
from tests.masks import check_masked, draw

P = np.exp(LP)
ONES = np.ones(9, bool)


@pytest.mark.parametrize("loss", [kljax.reinforce_loss, kljax.gpg_loss])
def test_reinforce(loss) -> None:
    check_pointwise(lambda lp, adv: loss(lp, adv, MASK), -ADV * LP, -ADV, data=(ADV,))


@pytest.mark.parametrize("tau", [0.0, 1.0, 0.25])
def test_opmd(tau: float) -> None:
    share = 1 / (1 + tau)
    check_pointwise(
        lambda lp, adv: kljax.opmd_loss(lp, adv, MASK, tau=tau), -ADV * LP * share, -ADV * share, data=(ADV,)
    )


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_importance_sampling(clip: float | None, cap: float | None) -> None:
    bounded = np.exp(np.clip(D, -(clip or np.inf), clip or np.inf))
    ratio, moves = np.minimum(bounded, cap or np.inf), (np.abs(D) <= (clip or np.inf)) & (bounded <= (cap or np.inf))
    assert moves.any()
    check_pointwise(
        lambda lp, old, adv: kljax.importance_sampling_loss(lp, old, adv, MASK, log_ratio_clip=clip, max_ratio=cap),
        -ADV * ratio,
        np.where(moves, -ADV * R, 0),
    )


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_topr(threshold: float) -> None:
    weight = np.where(threshold >= ADV, np.minimum(R, 1), 1)
    assert other_seeds.shown(((weight < 1) & (ADV > 0)).any() == (threshold > 0))
    check_pointwise(
        lambda lp, old, adv: kljax.topr_loss(lp, old, adv, MASK, threshold=threshold),
        -ADV * weight * LP,
        -ADV * weight,
    )


@pytest.mark.parametrize(
    ("weight", "expected"), [("none", np.ones_like(P)), ("probability", P), ("uncertainty", P * (1 - P))]
)
@pytest.mark.parametrize("cutoff", [None, 0.2])
def test_cross_entropy(weight: str, expected: np.ndarray, cutoff: float | None) -> None:
    def loss(lp: jax.Array) -> jax.Array:
        return kljax.cross_entropy_loss(lp, MASK, weight=weight, max_probability=cutoff)

    below = np.minimum(LP, np.log(cutoff or 10.0))
    np.testing.assert_allclose(loss(LP), np.where(MASK, -expected * below, 0), 1e-12)
    slope = np.where((below == LP) & MASK, -expected, 0)
    np.testing.assert_allclose(jax.grad(lambda lp: loss(lp).sum())(jnp.asarray(LP)), slope, 1e-12)
    check_masked(loss, [LP])


def test_uncertainty_of_an_almost_certain_token() -> None:
    lp, mask = jnp.asarray([-1e-6], jnp.float32), jnp.ones(1, bool)
    grad = jax.grad(lambda lp: kljax.cross_entropy_loss(lp, mask, weight="uncertainty").sum())(lp)
    np.testing.assert_allclose(grad, -1e-6, 1e-5)


def test_far_log_ratios_times_zero_do_not_overflow() -> None:
    check_far(lambda lp, old, adv: kljax.reinforce_loss(lp, adv, ONES), np.float32)
    check_far(lambda lp, old, adv: kljax.topr_loss(lp, old, adv, ONES), np.float32)
    check_far(lambda lp, old, adv: kljax.importance_sampling_loss(lp, old, adv, ONES))
    for bound in ({"log_ratio_clip": 20.0}, {"max_ratio": 5.0}):
        _, slope = check_far(
            lambda lp, old, adv, b=bound: kljax.importance_sampling_loss(lp, old, adv, ONES, **b), np.float32
        )
        np.testing.assert_array_equal(slope[2::3], 0)


def test_overflowing_ratio_with_advantage_zero_is_zero() -> None:
    lp, old, mask = jnp.array([1000.0]), jnp.zeros(1), jnp.ones(1, bool)
    value, grad = jax.value_and_grad(lambda lp: kljax.importance_sampling_loss(lp, old, jnp.zeros(1), mask).sum())(lp)
    assert (value, grad[0]) == (0, 0)


def test_skyrl_and_verl_policy_gradients_are_weighted() -> None:
    rollout = draw(0.7, seed=4)[0] - 2.0
    ratio = np.exp(LP - rollout)
    inside = (ratio > 0.8) & (ratio < 1.28)
    assert 0 < inside[MASK].sum() < MASK.sum()
    for options, weight in (
        ({"mode": "mask", "lower": 0.8, "upper": 1.28}, np.where(inside, ratio, 0)),
        ({"mode": "truncate", "upper": 2.0}, np.minimum(ratio, 2.0)),
    ):

        def loss(lp: jax.Array, options=options) -> jax.Array:
            weights = kljax.importance_weights(jax.lax.stop_gradient(lp), rollout, MASK, **options)
            return (weights * kljax.reinforce_loss(lp, ADV, MASK)).sum()

        value, grad = jax.value_and_grad(loss)(jnp.asarray(LP))
        np.testing.assert_allclose(value, np.where(MASK, -weight * ADV * LP, 0).sum(), 1e-12)
        np.testing.assert_allclose(grad, np.where(MASK, -weight * ADV, 0), 1e-12)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"advantages: got shape \[6\], expected \[6, 7\].*broadcast_to_tokens"):
        kljax.reinforce_loss(LP, ADV[:, 0], MASK)
    with pytest.raises(ValueError, match="weight: got 'prob', expected one of none, probability, uncertainty"):
        kljax.cross_entropy_loss(LP, MASK, weight="prob")
    for function, options in (
        (kljax.importance_sampling_loss, {"max_ratio": 0}),
        (kljax.importance_sampling_loss, {"log_ratio_clip": 0.0}),
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: got 0"):
            function(LP, OLD, ADV, MASK, **options)
    with pytest.raises(ValueError, match="tau: got -1"):
        kljax.opmd_loss(LP, ADV, MASK, tau=-1)
    with pytest.raises(ValueError, match="max_probability: got 0"):
        kljax.cross_entropy_loss(LP, MASK, max_probability=0)
