import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, draw

LP, OLD, ADV = draw(0.7, 0.7, 2.0)
D = LP - OLD
N = np.maximum(MASK.sum(-1, keepdims=True), 1)
GEOMETRIC = np.broadcast_to(np.exp(np.where(MASK, D, 0).sum(-1, keepdims=True) / N), MASK.shape)


def surrogate(ratio: np.ndarray, low: float, high: float, dual: float | None = None) -> np.ndarray:
    """The formula of the papers, max of two terms and min of a third."""
    loss = np.maximum(-ADV * ratio, -ADV * np.clip(ratio, 1 - low, 1 + high))
    if dual is not None:
        loss = np.where(ADV < 0, np.minimum(loss, -dual * ADV), loss)
    return np.where(MASK, loss, 0)


def weights() -> np.ndarray:
    return np.where(MASK, 1.0 + np.arange(MASK.size).reshape(MASK.shape) % 5, 0)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_ppo_value_and_gradient(dual_clip: float | None) -> None:
    def loss(lp: jax.Array) -> jax.Array:
        return kljax.ppo_clip_loss(lp, OLD, ADV, MASK, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)

    np.testing.assert_allclose(loss(LP), surrogate(np.exp(D), 0.2, 0.3, dual_clip), 1e-12, 1e-14)
    r = np.exp(D)
    active = np.where(ADV > 0, r <= 1.3, (r >= 0.8) & (r <= (dual_clip or np.inf)))
    grad = jax.grad(lambda lp: loss(lp).sum())(jnp.asarray(LP))
    np.testing.assert_allclose(grad, np.where(MASK & active, -ADV * r, 0), 1e-12, 1e-14)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.5, 1.0, -1.5),  # on the upper bound the clip still passes the gradient
        (0.5, -1.0, 0.5),  # and on the lower one
        (2.0, -1.0, 1.0),  # on the dual clip two terms tie and share it
        (4.0, -1.0, 0.0),
        (1.75, 1.0, 0.0),
        (0.25, -1.0, 0.0),
        (0.25, 1.0, -0.25),
        (1.75, -1.0, 1.75),
        (1.0, 0.0, 0.0),
    ],
)
def test_ppo_gradient_at_the_bounds_equals_pytorch(ratio, advantage, expected) -> None:
    # exp and log of powers of two are not exact; the ratio is formed from log-probs that give it exactly.
    lp = jnp.log(jnp.array([ratio]))
    if jnp.exp(lp)[0] != ratio:
        lp = jnp.nextafter(lp, jnp.where(jnp.exp(lp) < ratio, jnp.inf, -jnp.inf))
    assert jnp.exp(lp)[0] == ratio

    def loss(lp: jax.Array) -> jax.Array:
        adv = jnp.array([advantage])
        bounds = {"clip_low": 0.5, "clip_high": 0.5, "dual_clip": 2.0}
        return kljax.ppo_clip_loss(lp, jnp.zeros(1), adv, jnp.ones(1, bool), **bounds).sum()

    np.testing.assert_allclose(jax.grad(loss)(lp)[0], expected, 1e-15)


@pytest.mark.parametrize("function", [kljax.ppo_clip_loss, kljax.gspo_loss])
def test_clipped_overflowing_ratio_has_gradient_zero(function) -> None:
    lp, old, mask = np.array([[2000.0]]), np.zeros((1, 1)), np.ones((1, 1), bool)
    clipped = jax.jit(jax.value_and_grad(lambda lp, adv: function(lp, old, adv, mask, clip_high=0.25).sum()))
    for advantage, expected in ((1.0, -1.25), (0.0, 0.0)):
        value, grad = clipped(lp, np.full((1, 1), advantage))
        assert value == expected
        assert grad == 0
    if function is kljax.ppo_clip_loss:
        down = np.full((1, 1), -1.0)
        capped = jax.jit(jax.value_and_grad(lambda lp: function(lp, old, down, mask, dual_clip=3.0).sum()))
        assert capped(lp) == (3.0, 0.0)


def test_the_clip_of_the_log_ratio() -> None:
    old, mask = np.zeros(2), np.ones(2, bool)

    @jax.jit
    def value_and_slope(lp: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, pull = jax.vjp(lambda lp: kljax.ppo_clip_loss(lp, old, -np.ones(2), mask, log_ratio_clip=20.0), lp)
        return value, pull(jnp.ones_like(value))[0]

    value, slope = value_and_slope(np.array([30.0, 1.0]))
    np.testing.assert_allclose(value, np.exp([20.0, 1.0]), 1e-14)
    np.testing.assert_allclose(slope, [0, np.e], 1e-14)


@pytest.mark.parametrize("gradient", ["token", "sequence"])
def test_gspo_value_and_gradient(gradient: str) -> None:
    w = weights()

    def loss(lp: jax.Array) -> jax.Array:
        return kljax.gspo_loss(lp, OLD, ADV, MASK, clip_low=0.2, clip_high=0.3, gradient=gradient)

    np.testing.assert_allclose(loss(LP), surrogate(GEOMETRIC, 0.2, 0.3), 1e-12, 1e-14)
    s = GEOMETRIC
    active = np.where(ADV > 0, s <= 1.3, s >= 0.8)
    per_token = np.where(MASK & active, -ADV * s * w, 0)
    if gradient == "sequence":
        per_token = np.where(MASK, per_token.sum(-1, keepdims=True) / N, 0)
    grad = jax.grad(lambda lp: (loss(lp) * w).sum())(jnp.asarray(LP))
    np.testing.assert_allclose(grad, per_token, 1e-12, 1e-14)


def test_gspo_log_ratio_bound_is_one_sided() -> None:
    mask, adv = np.ones((2, 2), bool), np.array([[-1.0, -1.0], [1.0, 1.0]])
    bounded = jax.jit(lambda lp: kljax.gspo_loss(lp, np.zeros((2, 2)), adv, mask, max_log_ratio=10.0))
    loss = bounded(np.array([[12.0, 12.0], [-12.0, -12.0]]))
    np.testing.assert_allclose(loss, [[np.exp(10.0)] * 2, [-np.exp(-12.0)] * 2], 1e-14)


def test_cispo_value_and_gradient() -> None:
    weight = np.clip(np.exp(D), 0.5, 1.3)

    def loss(lp: jax.Array) -> jax.Array:
        return kljax.cispo_loss(lp, OLD, ADV, MASK, clip_low=0.5, clip_high=0.3)

    np.testing.assert_allclose(loss(LP), np.where(MASK, -ADV * weight * LP, 0), 1e-12, 1e-14)
    grad = jax.grad(lambda lp: loss(lp).sum())(jnp.asarray(LP))
    np.testing.assert_allclose(grad, np.where(MASK, -ADV * weight, 0), 1e-12, 1e-14)


def test_bounds_may_be_traced_in_another_float_type() -> None:
    traced = jax.jit(lambda low, high: kljax.ppo_clip_loss(LP, OLD, ADV, MASK, clip_low=low, clip_high=high))
    expected = kljax.ppo_clip_loss(LP, OLD, ADV, MASK, clip_low=0.25, clip_high=0.5)
    np.testing.assert_allclose(traced(jnp.float32(0.25), jnp.float32(0.5)), expected, 1e-13)


def test_on_policy_every_loss_has_the_policy_gradient() -> None:
    for function in (kljax.ppo_clip_loss, kljax.gspo_loss, kljax.cispo_loss):
        grad = jax.grad(lambda lp, function=function: function(lp, OLD, ADV, MASK).sum())(jnp.asarray(OLD))
        np.testing.assert_allclose(grad, np.where(MASK, -ADV, 0), 1e-12)


@pytest.mark.parametrize("function", [kljax.ppo_clip_loss, kljax.gspo_loss, kljax.cispo_loss])
def test_errors_name_the_argument(function) -> None:
    with pytest.raises(ValueError, match=r"advantages: got shape \[6\], expected \[6, 7\].*broadcast_to_tokens"):
        function(LP, OLD, ADV[:, 0], MASK)
    with pytest.raises(ValueError, match="clip_low: got -1"):
        function(LP, OLD, ADV, MASK, clip_low=-1)
    with pytest.raises(ValueError, match="shapes differ"):
        function(LP, OLD[1:], ADV, MASK)


def test_errors_of_single_losses() -> None:
    with pytest.raises(ValueError, match="dual_clip: got 1, expected a number > 1"):
        kljax.ppo_clip_loss(LP, OLD, ADV, MASK, dual_clip=1)
    with pytest.raises(ValueError, match="gradient: got 'tokens'"):
        kljax.gspo_loss(LP, OLD, ADV, MASK, gradient="tokens")
