import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.kljax.losses.pointwise import ADV, LP, MASK, OLD, D, N, R, check_far, check_pointwise

ROW = np.broadcast_to(np.exp(np.where(MASK, D, 0).sum(-1, keepdims=True) / N), MASK.shape)
BOUNDS = {"clip_low": 0.3, "clip_high": 0.4, "ring_low": 0.6, "ring_high": 1.0}
INSIDE = (R >= 0.7) & (R <= 1.4)
KEPT = {
    "none": np.ones_like(MASK),
    "one_side": ~((ADV > 0) & (R > 1.4) | (ADV < 0) & (R < 0.7)),
    "gspo_one_side": ~((ADV > 0) & (ROW > 1.4) | (ADV < 0) & (ROW < 0.7)),
    "two_side": INSIDE,
    "ring": INSIDE | (ADV > 0) & (R <= 0.4) | (ADV < 0) & (R >= 2.0),
}
WEIGHTS = {"none": 1.0, "importance_sampling": R, "gspo_importance_sampling": ROW, "advantage": np.exp(ADV / 2)}
PENALTIES = {"none": (0, 0), "k2": (D**2 / 2, D), "forward_kl": (-LP, -1)}
ONES = np.ones(9, bool)


@pytest.mark.parametrize(
    ("clip_mode", "weight", "regularizer"),
    [
        *[(mode, "none", "none") for mode in KEPT],
        *[("none", weight, "none") for weight in WEIGHTS],
        ("one_side", "importance_sampling", "k2"),
        ("gspo_one_side", "gspo_importance_sampling", "none"),
        ("two_side", "advantage", "k2"),
        ("ring", "none", "forward_kl"),
    ],
)
def test_rec(clip_mode: str, weight: str, regularizer: str) -> None:
    selected = KEPT[clip_mode]
    assert clip_mode == "none" or 0 < selected[MASK].sum() < MASK.sum()
    penalty, pull = PENALTIES[regularizer]
    scale = -ADV * selected * WEIGHTS[weight]
    names = {"clip_mode": clip_mode, "weight": weight, "regularizer": regularizer}
    check_pointwise(
        lambda lp, old, adv: kljax.rec_loss(lp, old, adv, MASK, **names, **BOUNDS, coef=0.6, temperature=2.0),
        scale * LP + 0.6 * penalty,
        scale + 0.6 * pull,
        masks=clip_mode != "none" or weight != "none",
    )


def test_ring_is_wider_than_both_sides() -> None:
    assert (KEPT["ring"] & ~KEPT["two_side"] & MASK).any()
    assert (KEPT["one_side"] & ~KEPT["ring"] & MASK).any()


def test_skyrl_rollout_is_is_a_two_sided_rec() -> None:
    rec = kljax.rec_loss(LP, OLD, ADV, MASK, clip_mode="two_side", weight="importance_sampling", clip_high=0.28)
    weights = kljax.importance_weights(LP, OLD, MASK, mode="mask", lower=0.8, upper=1.28)
    np.testing.assert_allclose(rec, weights * kljax.reinforce_loss(LP, ADV, MASK), 1e-12)


@pytest.mark.parametrize("coef", [0.1, 0.5])
def test_dro(coef: float) -> None:
    check_pointwise(
        lambda lp, old, adv: kljax.dro_loss(lp, old, adv, MASK, coef=coef),
        -(LP * ADV - coef / 2 * D**2),
        -ADV + coef * D,
    )


def test_far_apart() -> None:
    check_far(lambda lp, old, adv: kljax.dro_loss(lp, old, adv, ONES, coef=0.1), np.float32)
    options = {"clip_mode": "two_side", "weight": "importance_sampling", "regularizer": "k2", "coef": 0.1}
    check_far(lambda lp, old, adv: kljax.rec_loss(lp, old, adv, ONES, **options), np.float32)
    # PPO's side alone lets a falling advantage have any ratio.
    check_far(lambda lp, old, adv: kljax.rec_loss(lp, old, adv, ONES, **{**options, "clip_mode": "one_side"}))
    lp, old = jnp.array([1000.0]), jnp.zeros(1)
    for advantage, mode in ((0.0, "none"), (1.0, "one_side")):
        value, grad = jax.value_and_grad(
            lambda lp, a=advantage, mode=mode: kljax.rec_loss(
                lp, old, jnp.full(1, a), jnp.ones(1, bool), clip_mode=mode, weight="importance_sampling"
            ).sum()
        )(lp)
        assert (value, grad[0]) == (0, 0)


def test_errors_name_the_argument() -> None:
    for options, message in (
        ({"clip_mode": "two-side"}, "clip_mode: got 'two-side', expected one of .*did you mean 'two_side'"),
        ({"weight": "is"}, "weight: got 'is'"),
        ({"regularizer": "k3"}, "regularizer: got 'k3', expected one of none, k2, forward_kl"),
        ({"clip_low": -1}, "clip_low: got -1"),
        ({"ring_high": -1}, "ring_high: got -1"),
        ({"coef": -1}, "coef: got -1"),
        ({"temperature": 0}, "temperature: got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            kljax.rec_loss(LP, OLD, ADV, MASK, **options)
    with pytest.raises(ValueError, match="coef: got 0, expected a number > 0"):
        kljax.dro_loss(LP, OLD, ADV, MASK, coef=0)
    with pytest.raises(ValueError, match=r"advantages: got shape \[6\]"):
        kljax.dro_loss(LP, OLD, ADV[:, 0], MASK, coef=1)
