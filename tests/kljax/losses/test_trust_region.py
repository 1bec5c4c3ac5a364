import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.kljax.losses.pointwise import ADV, LP, MASK, OLD, D, R, check_far, check_pointwise

Q, P = np.exp(LP), np.exp(OLD)
APART = {"tv": np.abs(Q - P), "kl": P * np.log(P / Q) + (1 - P) * np.log((1 - P) / (1 - Q))}
BOUNDS = {"tv": {"clip_low": 0.055, "clip_high": 0.05}, "kl": {"clip_low": 0.017, "clip_high": 0.016}}
ONES = np.ones(9, bool)


def kept(divergence: str, *, symmetric: bool) -> np.ndarray:
    """Written out: which tokens went too far, and which of those went where their advantage sends them."""
    low, high = BOUNDS[divergence].values()
    too_high, too_low = (Q > P) & (APART[divergence] > high), (Q < P) & (APART[divergence] > low)
    if not symmetric:
        too_high, too_low = too_high & (ADV > 0), too_low & (ADV < 0)
    return ~(too_high | too_low)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_dppo_mask(divergence: str, symmetric: bool) -> None:
    expected = kept(divergence, symmetric=symmetric)
    for sign in (ADV > 0, ADV < 0):
        assert 0 < expected[sign & MASK].sum() < (sign & MASK).sum()
    options = {**BOUNDS[divergence], "divergence": divergence, "symmetric": symmetric}
    np.testing.assert_array_equal(kljax.dppo_mask(LP, OLD, ADV, MASK, **options), MASK & expected)
    poisoned = [np.where(MASK, x, np.nan) for x in (LP, OLD, ADV)]
    np.testing.assert_array_equal(kljax.dppo_mask(*poisoned, MASK, **options), MASK & expected)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_mask_with_probabilities_near_0_and_1(divergence: str) -> None:
    # 1 - q is 1e-5 against 3e-5: the direct formulas lose it in float32, the bounds here lie between the values.
    first, second = np.log1p(np.array([-3e-5, -1e-5])), np.log(np.array([1e-5, 3e-5]))
    lp, old = (np.asarray([first[i], second[i]], np.float32) for i in (1, 0))
    p, q = np.exp(old.astype(float)), np.exp(lp.astype(float))
    exact = np.abs(q - p) if divergence == "tv" else p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    for factor, expected in ((0.999, False), (1.001, True)):
        for token in range(2):
            bound = {"clip_high": float(exact[token]) * factor, "divergence": divergence}
            got = kljax.dppo_mask(lp[token], old[token], np.float32(1), np.array(True), **bound)
            assert got == expected


def test_dppo_mask_at_the_bound_and_without_change() -> None:
    lp, old = jnp.log(jnp.array([0.75, 0.25, 0.5])), jnp.log(jnp.array([0.5, 0.5, 0.5]))
    adv, mask = jnp.array([1.0, -1.0, 1.0]), jnp.ones(3, bool)
    # exp(log(0.75)) is not exact; what the bound is compared with is.
    distance = float(abs(jnp.exp(lp[0]) * jnp.expm1(old[0] - lp[0])))
    assert kljax.dppo_mask(lp, old, adv, mask, clip_low=0.3, clip_high=distance)[0]
    np.testing.assert_array_equal(kljax.dppo_mask(lp, old, adv, mask, clip_low=0, clip_high=0), [False, False, True])


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("through", ["ratio", "log_prob"])
def test_dppo(divergence: str, symmetric: bool, through: str) -> None:
    options = {**BOUNDS[divergence], "divergence": divergence, "symmetric": symmetric, "through": through}
    keep = kept(divergence, symmetric=symmetric)
    for cap, clip in ((np.inf, None), (1.1, None), (np.inf, 0.15)):
        bounded = np.exp(np.clip(D, -(clip or np.inf), clip or np.inf))
        ratio = keep * np.minimum(bounded, cap)
        value = -ADV * ratio * (LP if through == "log_prob" else 1)
        moves = (bounded <= cap) & (np.abs(D) <= (clip or np.inf)) if through == "ratio" else True
        check_pointwise(
            lambda lp, old, adv, cap=cap, clip=clip: kljax.dppo_loss(
                lp, old, adv, MASK, **options, max_ratio=cap if np.isfinite(cap) else None, log_ratio_clip=clip
            ),
            value,
            np.where(moves, -ADV * ratio, 0),
            masks=clip is not None and not symmetric,
        )


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_far_apart(divergence: str) -> None:
    for through in ("ratio", "log_prob"):
        for bound in ({"max_ratio": 3.0}, {"log_ratio_clip": 20.0}):
            check_far(
                lambda lp, old, adv, o={"through": through, **bound}: kljax.dppo_loss(
                    lp, old, adv, ONES, divergence=divergence, **o
                ),
                np.float32,
            )
    # A token that is dropped may have any ratio: it has no loss and no gradient.
    lp, old, adv = jnp.array([0.0]), jnp.array([-1000.0]), jnp.array([1.0])
    dropped = jax.value_and_grad(lambda lp: kljax.dppo_loss(lp, old, adv, jnp.ones(1, bool), divergence=divergence)[0])
    assert dropped(lp) == (0, 0)


@pytest.mark.parametrize("clip", [0.3, 1.0])
def test_sppo(clip: float) -> None:
    inside = (1 / (1 + clip) <= R) & (1 + clip >= R)
    assert 0 < inside[MASK].sum() < MASK.sum()
    check_pointwise(
        lambda lp, old, adv: kljax.sppo_loss(lp, old, adv, MASK, clip=clip),
        np.where(inside, -ADV * D, 0),
        np.where(inside, -ADV, 0),
    )


def test_sppo_far_apart() -> None:
    check_far(lambda lp, old, adv: kljax.sppo_loss(lp, old, adv, ONES), np.float32)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="divergence: got 'k1', expected one of tv, kl"):
        kljax.dppo_loss(LP, OLD, ADV, MASK, divergence="k1")
    with pytest.raises(ValueError, match="through: got 'pi', expected one of ratio, log_prob"):
        kljax.dppo_loss(LP, OLD, ADV, MASK, through="pi")
    with pytest.raises(ValueError, match="clip_high: got -1"):
        kljax.dppo_mask(LP, OLD, ADV, MASK, clip_high=-1)
    with pytest.raises(ValueError, match="max_ratio: got 0"):
        kljax.dppo_loss(LP, OLD, ADV, MASK, max_ratio=0)
    with pytest.raises(ValueError, match="clip: got 0"):
        kljax.sppo_loss(LP, OLD, ADV, MASK, clip=0)
    for function in (kljax.dppo_loss, kljax.dppo_mask, kljax.sppo_loss):
        with pytest.raises(ValueError, match=r"advantages: got shape \[6\]"):
            function(LP, OLD, ADV[:, 0], MASK)
