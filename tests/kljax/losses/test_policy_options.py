"""The options of PPO, GSPO and CISPO that one or two systems have: caps, levels of the ratio, CISPO's mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import other_seeds
from tests.kljax.losses.pointwise import ADV, LP, MASK, OLD, WEIGHTS, D, N, R, check_far, check_pointwise
from tests.masks import check_masked

LOW, HIGH = 0.8, 1.3
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
ONES = np.ones(9, bool)
SUM = np.where(MASK, D, 0).sum(-1, keepdims=True)
ROW = np.exp(SUM / N)


@pytest.mark.parametrize("cap", [1.1, 1.6, 3.0])
@pytest.mark.parametrize("dual", [None, 2.0])
def test_max_ratio_caps_the_unclipped_term(cap: float, dual: float | None) -> None:
    # As TRL writes it: the capped ratio against the clipped one.
    terms = -ADV * np.minimum(R, cap), -ADV * np.clip(R, LOW, HIGH)
    value = np.maximum(*terms)
    slope = np.where(terms[0] > terms[1], -ADV * R * (cap >= R), np.where((R <= HIGH) & (LOW <= R), -ADV * R, 0))
    if dual is not None:
        slope = np.where((ADV < 0) & (value > -dual * ADV), 0, slope)
        value = np.where(ADV < 0, np.minimum(value, -dual * ADV), value)
    check_pointwise(
        lambda lp, old, adv: kljax.ppo_clip_loss(lp, old, adv, MASK, **CLIP, max_ratio=cap, dual_clip=dual),
        value,
        slope,
        masks=dual is not None and cap > HIGH,
    )


@pytest.mark.parametrize("cap", [1.0, 1.1, 1.6])
def test_art_ratio_cap_comes_first(cap: float) -> None:
    ratio = np.minimum(R, cap)
    expected = np.maximum(-ADV * ratio, -ADV * np.clip(ratio, LOW, HIGH))
    loss = kljax.ppo_clip_loss(LP, OLD, ADV, MASK, clip_low=0.2, clip_high=min(0.3, cap - 1), max_ratio=cap)
    np.testing.assert_allclose(loss, np.where(MASK, expected, 0), 1e-12, 1e-14)


@pytest.mark.parametrize(("cap", "advantage", "expected"), [(2.0, -1.0, 2.0), (1.25, 1.0, -1.25), (1.25, -1.0, 1.25)])
def test_gradient_at_max_ratio_is_not_split(cap: float, advantage: float, expected: float) -> None:
    lp = jnp.log(jnp.array([cap]))
    if jnp.exp(lp)[0] != cap:
        lp = jnp.nextafter(lp, jnp.where(jnp.exp(lp) < cap, jnp.inf, -jnp.inf))
    assert jnp.exp(lp)[0] == cap
    adv, options = jnp.array([advantage]), {"clip_low": 0.5, "clip_high": 0.5, "max_ratio": cap}
    grad = jax.grad(lambda lp: kljax.ppo_clip_loss(lp, jnp.zeros(1), adv, jnp.ones(1, bool), **options).sum())(lp)
    np.testing.assert_allclose(grad[0], expected, 1e-15)


def ratios(level: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ratio of a level, and `d ratio_t / d log pi_u` as a part with `u = t` and a part for each `u` of the row."""
    zero = np.zeros(MASK.shape)
    token_ratio, of_row = {
        "sequence": (zero, np.exp(SUM)),
        "geometric": (zero, ROW / N),
        "average": (R / 2, ROW / N / 2),
        "geometric_average": (np.sqrt(R * ROW) / 2, np.sqrt(R * ROW) / N / 2),
    }[level]
    value = {
        "sequence": np.exp(SUM),
        "geometric": ROW,
        "average": (R + ROW) / 2,
        "geometric_average": np.sqrt(R * ROW),
    }[level]
    return tuple(np.broadcast_to(x, MASK.shape) for x in (value, token_ratio, of_row))


@pytest.mark.parametrize("level", ["sequence", "geometric", "average", "geometric_average"])
def test_levels_of_ppo(level: str) -> None:
    ratio, token_ratio, of_row = ratios(level)
    value = np.maximum(-ADV * ratio, -ADV * np.clip(ratio, LOW, HIGH))
    scale = np.where(MASK & np.where(ADV > 0, ratio <= HIGH, ratio >= LOW), -ADV * WEIGHTS, 0)

    def loss(lp: jax.Array, old: jax.Array, adv: jax.Array) -> jax.Array:
        return kljax.ppo_clip_loss(lp, old, adv, MASK, **CLIP, level=level)

    np.testing.assert_allclose(loss(LP, OLD, ADV), np.where(MASK, value, 0), 1e-12, 1e-14)
    expected = np.where(MASK, scale * token_ratio + (scale * of_row).sum(-1, keepdims=True), 0)
    gradient = jax.grad(lambda lp: (loss(lp, OLD, ADV) * WEIGHTS).sum())(jnp.asarray(LP))
    np.testing.assert_allclose(gradient, expected, 1e-11, 1e-14)
    check_masked(loss, [LP, OLD, ADV])


def test_the_geometric_level_of_ppo_is_gspo() -> None:
    ppo = kljax.ppo_clip_loss(LP, OLD, ADV, MASK, **CLIP, level="geometric", dual_clip=1.5, max_ratio=1.4)
    gspo = kljax.gspo_loss(LP, OLD, ADV, MASK, **CLIP, gradient="sequence", dual_clip=1.5, max_ratio=1.4)
    np.testing.assert_array_equal(ppo, gspo)
    unbounded = kljax.gspo_loss(LP, OLD, ADV, MASK, **CLIP, gradient="sequence")
    assert other_seeds.shown((gspo != unbounded).any())


def test_log_ratio_clip_comes_after_the_level() -> None:
    loss = kljax.ppo_clip_loss(LP, OLD, -np.ones_like(ADV), MASK, clip_low=1.0, level="sequence", log_ratio_clip=0.5)
    np.testing.assert_allclose(loss, np.where(MASK, np.exp(np.clip(SUM, -0.5, 0.5)), 0), 1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "average", "geometric_average"])
def test_levels_and_masks_of_cispo(level: str) -> None:
    ratio = R if level == "token" else ratios(level)[0]
    selected = ~((ADV > 0) & (ratio > 1.28) | (ADV < 0) & (ratio < 0.8))
    assert 0 < selected[MASK].sum() < MASK.sum()
    for options, weight in (
        ({}, np.clip(ratio, 0.5, 1.5)),
        ({"mask_low": 0.2, "mask_high": 0.28}, selected * np.clip(ratio, 0.5, 1.5)),
    ):
        check_pointwise(
            lambda lp, old, adv, o=options: kljax.cispo_loss(
                lp, old, adv, MASK, clip_low=0.5, clip_high=0.5, level=level, **o
            ),
            -ADV * weight * LP,
            -ADV * weight,
            masks=bool(options),
        )


def test_cispo_log_ratio_clip_bounds_the_weight() -> None:
    weight = np.exp(np.clip(LP - OLD, -0.1, 0.1))
    assert (weight != R)[MASK].any()
    check_pointwise(
        lambda lp, old, adv: kljax.cispo_loss(lp, old, adv, MASK, log_ratio_clip=0.1), -ADV * weight * LP, -ADV * weight
    )


def test_trl_bound_of_cispo_is_absolute() -> None:
    loss = kljax.cispo_loss(LP, OLD, ADV, MASK, clip_low=1.0, clip_high=0.2 - 1)
    np.testing.assert_allclose(loss, np.where(MASK, -ADV * np.minimum(R, 0.2) * LP, 0), 1e-12)


def test_art_ratio_mask_is_a_rejection_except_constants() -> None:
    # ART sets ratios outside the bounds to 0 and then clips them: a constant where A < 0, the lower bound in CISPO.
    inside = (R > LOW) & (R < HIGH)
    ratio = np.where(inside, R, 0)
    selected = kljax.rejection_mask(LP, OLD, MASK, lower=LOW, upper=HIGH)
    ppo = kljax.importance_sampling_loss(LP, OLD, ADV, MASK)
    ppo = jnp.where(selected, ppo, jnp.where(MASK, np.where(ADV < 0, -LOW * ADV, 0), 0))
    expected = np.maximum(-ADV * ratio, -ADV * np.clip(ratio, LOW, HIGH))
    np.testing.assert_allclose(ppo, np.where(MASK, expected, 0), 1e-12)
    cispo = jnp.where(selected, kljax.cispo_loss(LP, OLD, ADV, MASK), LOW * kljax.reinforce_loss(LP, ADV, MASK))
    np.testing.assert_allclose(cispo, np.where(MASK, -ADV * np.clip(ratio, LOW, HIGH) * LP, 0), 1e-12)


@pytest.mark.parametrize("options", [{"dual_clip": 3.0}, {"max_ratio": 2.0}, {"log_ratio_clip": 20.0}])
def test_ppo_far_apart(options: dict[str, float]) -> None:
    check_far(lambda lp, old, adv: kljax.ppo_clip_loss(lp, old, adv, ONES, **options), np.float32)


def test_gspo_and_cispo_far_apart() -> None:
    check_far(lambda lp, old, adv: kljax.cispo_loss(lp, old, adv, ONES), np.float32)
    for gradient in ("token", "sequence"):
        check_far(
            lambda lp, old, adv, g=gradient: kljax.gspo_loss(
                *(x[:, None] for x in (lp, old, adv)), ONES[:, None], gradient=g, max_log_ratio=10.0
            )[:, 0],
            np.float32,
        )


def test_fallback_to_the_policy_gradient() -> None:
    def loss(lp: jax.Array) -> jax.Array:
        return kljax.ppo_clip_loss(lp, jax.lax.stop_gradient(lp), ADV, MASK)

    np.testing.assert_array_equal(loss(jnp.asarray(LP)), np.where(MASK, -ADV, 0))
    np.testing.assert_array_equal(jax.grad(lambda lp: loss(lp).sum())(jnp.asarray(LP)), np.where(MASK, -ADV, 0))


def test_errors_name_the_argument() -> None:
    for function, options in (
        (kljax.ppo_clip_loss, {"max_ratio": 0}),
        (kljax.gspo_loss, {"max_ratio": -1}),
        (kljax.gspo_loss, {"dual_clip": 1}),
        (kljax.cispo_loss, {"clip_high": -2}),
        (kljax.ppo_clip_loss, {"level": "row"}),
        (kljax.cispo_loss, {"level": "row"}),
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: got "):
            function(LP, OLD, ADV, MASK, **options)
