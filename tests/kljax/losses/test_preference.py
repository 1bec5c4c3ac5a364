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
    with pytest.raises(ValueError, match=r"label_smoothing: got 0\.9, expected a number < 0\.5"):
        dpo(LP, REF, BAD, BAD_REF, label_smoothing=0.9)


# ---- functions of two scores ----

WIN, LOSS = np.array([1.5, -0.4, 0.3, 4.0]), np.array([-0.2, 0.9, 0.3, -5.0])
B, S, M, TAU = 0.7, 0.1, 0.25, 0.3


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def log_loss(margin: np.ndarray) -> np.ndarray:
    return -(1 - S) * np.log(sigmoid(margin)) - S * np.log(sigmoid(-margin))


def coins(margin: np.ndarray) -> np.ndarray:
    p = sigmoid(margin)
    return p * np.log(p / (1 - S)) + (1 - p) * np.log((1 - p) / S)


def odds(log_prob: np.ndarray) -> np.ndarray:
    return np.exp(log_prob) / (1 - np.exp(log_prob))


MARGIN = B * (WIN - LOSS) - M
BELOW = (-np.abs(WIN) - 0.01, -np.abs(LOSS) - 0.01)
FORMULAS = {
    "sigmoid": log_loss(MARGIN),
    "hinge": np.maximum(1 - MARGIN, 0),
    "ipo": (WIN - LOSS - 1 / (2 * B)) ** 2,
    "exo_pair": coins(MARGIN),
    "nca_pair": -np.log(sigmoid(B * WIN)) - (np.log(sigmoid(-B * WIN)) + np.log(sigmoid(-B * LOSS))) / 2,
    "robust": (-(1 - S) * np.log(sigmoid(MARGIN)) + S * np.log(sigmoid(-MARGIN))) / (1 - 2 * S),
    "bco_pair": -np.log(sigmoid(B * WIN)) - np.log(sigmoid(-B * LOSS)),
    "sppo_hard": (WIN - 1 / (2 * B)) ** 2 + (LOSS + 1 / (2 * B)) ** 2,
    "aot": log_loss(B * (np.sort(WIN) - np.sort(LOSS)) - M),
    "apo_zero": 1 - sigmoid(B * WIN) + sigmoid(B * LOSS),
    "apo_down": sigmoid(B * WIN) + 1 - sigmoid(B * (WIN - LOSS)),
    "discopop": -(1 - sigmoid(MARGIN / TAU)) * np.log(sigmoid(MARGIN)) + sigmoid(MARGIN / TAU) * np.exp(-MARGIN),
    "odds_ratio": -B * np.log(sigmoid(np.log(odds(BELOW[0]) / odds(BELOW[1])))),
}
NUMBERS = {"coef": B, "label_smoothing": S, "margin": M, "tau": TAU}


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_of_a_pair_has_its_formula(name: str) -> None:
    scores = BELOW if name == "odds_ratio" else (WIN, LOSS)
    run = jax.jit(lambda w, l: kljax.preference_loss(w, l, loss=name, **NUMBERS))
    np.testing.assert_allclose(run(*scores), FORMULAS[name], 1e-12)
    slopes = jax.grad(lambda pair: run(*pair).sum())(scores)
    for side, slope in enumerate(slopes):
        step = np.where(np.arange(2)[:, None] == side, 1e-6, 0)
        up, down = (run(*(score + sign * move for score, move in zip(scores, step, strict=True))) for sign in (1, -1))
        numeric = (up - down) / 2e-6
        if name == "aot":  # the losses are in the order of their ranks
            numeric = numeric[np.argsort(np.argsort(scores[side]))]
        np.testing.assert_allclose(slope, numeric, 1e-7, 1e-8)


@pytest.mark.parametrize("name", sorted(set(FORMULAS) - {"odds_ratio"}))
def test_far_scores_have_finite_losses_and_gradients(name: str) -> None:
    far = jnp.asarray([300.0, -300.0, 300.0, 0.0], jnp.float32), jnp.asarray([-300.0, 300.0, 300.0, 0.0], jnp.float32)
    options = {"loss": name, "coef": 0.2, "label_smoothing": 0.1}
    value, slopes = jax.value_and_grad(lambda pair: kljax.preference_loss(*pair, **options).sum())(far)
    assert np.isfinite([value, *np.ravel(slopes)]).all()


def test_dpo_is_the_sigmoid_of_summed_log_ratios() -> None:
    scores = jnp.asarray(sums(LP, REF, MASK)), jnp.asarray(sums(BAD, BAD_REF, BAD_MASK))
    expected = dpo(LP, REF, BAD, BAD_REF, coef=0.5, label_smoothing=0.1)
    np.testing.assert_allclose(kljax.preference_loss(*scores, coef=0.5, label_smoothing=0.1), expected, 1e-13)


def test_kto_weighs_gains_and_losses() -> None:
    wanted, weights = np.array([True, False, True, False]), {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    gain = sigmoid(0.7 * (WIN - 0.4))
    expected = np.where(wanted, 1.5 * (1 - gain), 0.5 * gain)
    slope = np.where(wanted, -1.5, 0.5) * 0.7 * gain * (1 - gain)
    value, pull = jax.vjp(lambda h: kljax.kto_loss(h, wanted, coef=0.7, kl=0.4, **weights), WIN)
    np.testing.assert_allclose(value, expected, 1e-13)
    np.testing.assert_allclose(pull(np.ones(4))[0], slope, 1e-13)
    assert jax.grad(lambda kl: kljax.kto_loss(WIN, wanted, kl=kl).sum())(0.4) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "logistic"}, "loss: got 'logistic', expected one of sigmoid"),
        ({"loss": "exo_pair"}, "label_smoothing: got 0.0, expected a number > 0"),
        ({"label_smoothing": 0.5}, "label_smoothing: got 0.5, expected a number < 0.5"),
        ({"label_smoothing": np.float32(0.75)}, r"label_smoothing: got .*0.75.*, expected a number < 0.5"),
        ({"coef": 0.0}, "coef: got 0.0"),
    ],
)
def test_wrong_options_of_a_pair_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kljax.preference_loss(WIN, LOSS, **options)
