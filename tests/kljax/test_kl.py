"""The estimators: values and gradients by formula, clips, dtypes, shapes, errors."""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kljax
from kljax.kl import ESTIMATORS, GRADIENTS
from tests import oracles

X = np.array([-2.5, -0.3, 0.0, 1e-5, 0.7, 4.0])
FORMULAS: dict[str, tuple[Callable[..., jax.Array], np.ndarray, np.ndarray]] = {
    "k1": (kljax.k1, X, np.ones_like(X)),
    "abs": (kljax.abs_diff, np.abs(X), np.sign(X)),
    "k2": (kljax.k2, X**2 / 2, X),
    "k3": (kljax.k3, oracles.k3(X), 1 - np.exp(-X)),
    "low_var_kl": (kljax.low_var_kl, oracles.k3(X), 1 - np.exp(-X)),
}


def at(x: object, **arguments: object) -> tuple[jax.Array, jax.Array]:
    """Value and gradient to `log_probs` at log-ratios `x`, elementwise."""
    log_probs = jnp.asarray(x) - 0.75
    ref = jnp.full(log_probs.shape, -0.75)
    value, pull_back = jax.vjp(lambda lp: kljax.estimate_kl(lp, ref, **arguments), log_probs)
    return value, pull_back(jnp.ones_like(value))[0]


@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_by_formula(name: str) -> None:
    function, value, grad = FORMULAS[name]
    chex.assert_trees_all_close(at(X, estimator=name), (value, grad), rtol=1e-10, atol=1e-15)
    chex.assert_trees_all_close(function(jnp.asarray(X), jnp.zeros(X.shape)), value, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("name", FORMULAS)
def test_gradient_to_the_reference_is_the_opposite(name: str) -> None:
    function = FORMULAS[name][0]
    to_policy, to_ref = jax.grad(lambda lp, ref: function(lp, ref).sum(), (0, 1))(jnp.asarray(X), jnp.zeros(X.shape))
    chex.assert_trees_all_equal(to_ref, -to_policy)


def test_none_has_zero_value_and_gradient() -> None:
    for gradient in GRADIENTS:
        value, grad = at(X, estimator="none", gradient=gradient)
        chex.assert_trees_all_equal((value, grad), (jnp.zeros(X.shape), jnp.zeros(X.shape)))


@pytest.mark.parametrize("name", FORMULAS)
def test_gradient_modes(name: str) -> None:
    value, _ = at(X, estimator=name)
    chex.assert_trees_all_close(at(X, estimator=name, gradient="k2"), (value, X), rtol=1e-12, atol=1e-15)
    chex.assert_trees_all_equal(at(X, estimator=name, gradient="none"), (value, jnp.zeros(X.shape)))


def test_straight_through_gradient_is_touched_by_no_clip() -> None:
    value, grad = at([-100.0, 100.0], estimator="low_var_kl", gradient="k2")
    chex.assert_trees_all_close((value, grad), (jnp.array([10.0, 10.0]), jnp.array([-100.0, 100.0])))


def test_importance_correction() -> None:
    lp, ref, sampling = jnp.array([-1.0, -1.0]), jnp.array([-1.3, -0.2]), jnp.array([-1.2, -3.0])
    ratio, x = np.exp(lp - sampling), lp - ref

    def corrected(lp: jax.Array, **arguments: object) -> jax.Array:
        return kljax.estimate_kl(lp, ref, sampling_log_probs=sampling, **arguments)

    def grad(**arguments: object) -> jax.Array:
        return jax.grad(lambda lp: corrected(lp, **arguments).sum())(lp)

    chex.assert_trees_all_close(corrected(lp, estimator="k3"), ratio * oracles.k3(x), rtol=1e-12)
    chex.assert_trees_all_close(grad(estimator="k3"), ratio * x, rtol=1e-12)
    chex.assert_trees_all_close(grad(estimator="k1"), ratio * (x + 1), rtol=1e-12)
    # The second ratio, e^2, is above the cap: it becomes a constant weight of 2.
    capped = np.array([ratio[0], 2.0])
    chex.assert_trees_all_close(corrected(lp, estimator="k3", max_ratio=2.0), capped * oracles.k3(x), rtol=1e-12)
    expected = np.array([ratio[0] * x[0], 2 * (1 - np.exp(-x[1]))])
    chex.assert_trees_all_close(grad(estimator="k3", max_ratio=2.0), expected, rtol=1e-12)
    chex.assert_trees_all_close(grad(estimator="k3", max_ratio=2.0, gradient="k2"), capped * x, rtol=1e-12)
    # The ratio in the gradient alone: OpenRLHF's unbiased gradient.
    weighted = {"estimator": "k3", "max_ratio": 2.0, "gradient": "weighted_k2"}
    chex.assert_trees_all_close((corrected(lp, **weighted), grad(**weighted)), (oracles.k3(x), capped * x), rtol=1e-12)


def test_capped_overflowing_ratio_has_a_finite_gradient() -> None:
    lp, ref, sampling = jnp.array([0.0]), jnp.array([-1.0]), jnp.array([-1000.0])
    value, grad = jax.value_and_grad(
        lambda lp: kljax.estimate_kl(lp, ref, sampling_log_probs=sampling, max_ratio=2.0).sum()
    )(lp)
    chex.assert_trees_all_close((value, grad), (2 * oracles.k3(1.0), jnp.array([2 * (1 - np.exp(-1))])), rtol=1e-12)


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_clip_gradients_are_inclusive_on_the_bound(side: float) -> None:
    # PyTorch's clamp has gradient 1 on both bounds; jnp.clip has 0.5 and lax.clamp 0.
    on, outside = side * 2.0, side * np.nextafter(2.0, 3.0)
    kwargs = {"estimator": "k1"}
    ref = jnp.zeros(1)
    for clips in ({"log_ratio_clip": 2.0}, {"value_clip": 2.0}):
        for x, expected in ((on, 1.0), (outside, 0.0)):
            value, grad = jax.value_and_grad(lambda lp, c=clips: kljax.estimate_kl(lp, ref, **kwargs, **c).sum())(
                jnp.array([x])
            )
            chex.assert_trees_all_equal((value, grad), (jnp.asarray(on), jnp.array([expected])))


def test_low_var_kl_has_the_clips_of_verl() -> None:
    # 20 and 10: the value saturates at x < -2.61 and x > 11, where exp(-x) - 1 + x = 10.
    value, grad = at([-30.0, -2.62, -2.60, 10.9, 11.1], estimator="low_var_kl")
    chex.assert_trees_all_close(value[jnp.array([0, 1, 4])], jnp.full(3, 10.0))
    chex.assert_trees_all_equal(grad == 0, jnp.array([True, True, False, False, True]))
    wide, _ = at([-30.0], estimator="low_var_kl", value_clip=1e9)
    chex.assert_trees_all_close(wide, oracles.k3([-20.0]), rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize(
    "clips", [{"value_clip": 5.0}, {"log_ratio_clip": 5.0}, {"log_ratio_clip": 5, "value_clip": 5}]
)
def test_overflow_under_a_clip_has_gradient_zero(clips: dict[str, float], dtype: jnp.dtype) -> None:
    lp = jnp.asarray([-1e4, -1e3, 1e4], dtype)
    for estimator in ("k2", "k3"):
        value, grad = jax.value_and_grad(
            lambda lp, e=estimator: kljax.estimate_kl(lp, jnp.zeros_like(lp), estimator=e, **clips).sum()
        )(lp)
        assert jnp.isfinite(value)
        chex.assert_trees_all_equal(grad, jnp.zeros_like(lp))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("key", ["openrlhf/k3", "slime/low_var_kl", "verl/low_var_kl"])
def test_overflow_under_the_value_clip_of_a_system(key: str, dtype: jnp.dtype) -> None:
    # At x = -100 (and -1000 in float64) slime and OpenRLHF give the value 10 and the gradient NaN (inf * 0); verl,
    # which also clips the log-ratio, gives 0. Here the clipped value has gradient 0 for every system's arguments.
    x, arguments = jnp.array([-1000.0, -100.0], dtype), kljax.systems.arguments(key)
    value, grad = jax.value_and_grad(lambda x: kljax.estimate_kl(x, jnp.zeros_like(x), **arguments).sum())(x)
    chex.assert_trees_all_equal((value, grad), (jnp.asarray(20, dtype), jnp.zeros_like(x)))


@pytest.mark.parametrize("distance", [-100.0, -800.0])
def test_corrected_k3_of_a_vanishing_ratio_is_finite(distance: float) -> None:
    # exp(lp - old) = 0 and exp(-x) = inf: Trinity's corrected_k3 is 0 * inf = NaN in value and gradient. Its arguments
    # have no clip of the log-ratio; with one, both are finite.
    lp, zero = jnp.array([distance]), jnp.array([0.0])
    arguments = {"estimator": "k3", "max_ratio": 2.0, "sampling_log_probs": zero, "log_ratio_clip": 20.0}
    value, grad = jax.value_and_grad(lambda lp: kljax.estimate_kl(lp, zero, **arguments).sum())(lp)
    chex.assert_trees_all_close((value, grad[0]), (jnp.zeros(()), jnp.zeros(())), rtol=0, atol=1e-30)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("given_dtype", "ref_dtype", "result"),
    [
        (jnp.bfloat16, jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.float64, jnp.float64),
        (jnp.float64, jnp.float64, jnp.float64),
    ],
)
def test_dtypes(estimator: str, given_dtype: jnp.dtype, ref_dtype: jnp.dtype, result: jnp.dtype) -> None:
    lp, ref = jnp.asarray([-1.0, -2.0], given_dtype), jnp.asarray([-1.5, -1.0], ref_dtype)
    value, pull_back = jax.vjp(lambda lp: kljax.estimate_kl(lp, ref, jnp.array([True, False]), estimator=estimator), lp)
    assert value.dtype == result
    assert pull_back(jnp.ones_like(value))[0].dtype == given_dtype
    wide = kljax.estimate_kl(lp.astype(jnp.float64), ref.astype(jnp.float64), estimator=estimator)
    chex.assert_trees_all_close(value[0].astype(jnp.float64), wide[0], rtol=2e-7, atol=1e-7)


def test_wide_value_clip_keeps_float32() -> None:
    lp, clip = jnp.asarray([-1.0, -2.0], jnp.float32), jnp.asarray(0.1, jnp.float64)
    for gradient in GRADIENTS:
        value, pull_back = jax.vjp(
            lambda lp, g=gradient: kljax.estimate_kl(lp, jnp.zeros_like(lp), gradient=g, value_clip=clip), lp
        )
        chex.assert_trees_all_equal((value, value.dtype), (jnp.full(2, 0.1, jnp.float32), lp.dtype))
        assert pull_back(jnp.ones_like(value))[0].dtype == lp.dtype


@given(seed=st.integers(0, 1000), mask=oracles.masks(4, 5), estimator=st.sampled_from(ESTIMATORS))
def test_mask_selects(seed: int, mask: np.ndarray, estimator: str) -> None:
    rng = np.random.default_rng(seed)
    lp, ref = jnp.asarray(rng.normal(size=(4, 5))), jnp.asarray(rng.normal(size=(4, 5)))
    expected = oracles.masked_array(kljax.estimate_kl(lp, ref, estimator=estimator), mask).filled(0.0)
    chex.assert_trees_all_equal(np.asarray(kljax.estimate_kl(lp, ref, mask, estimator=estimator)), expected)


def test_leading_axes_jit_and_vmap() -> None:
    lp, ref = (jax.random.normal(jax.random.key(i), (2, 3, 4), jnp.float64) for i in range(2))
    full = kljax.estimate_kl(lp, ref, estimator="k3", gradient="k2")
    rows = [[kljax.estimate_kl(lp[i, j], ref[i, j]) for j in range(3)] for i in range(2)]
    chex.assert_trees_all_close(full, jnp.stack([jnp.stack(row) for row in rows]), rtol=1e-14)
    chex.assert_trees_all_close(jax.vmap(kljax.estimate_kl)(lp, ref), full, rtol=1e-14)
    jitted = jax.jit(
        lambda lp, clip, cap: kljax.estimate_kl(lp, ref, sampling_log_probs=ref, value_clip=clip, max_ratio=cap)
    )
    direct = kljax.estimate_kl(lp, ref, sampling_log_probs=ref, value_clip=3.0, max_ratio=2.0)
    chex.assert_trees_all_close(jitted(lp, 3.0, 2.0), direct, rtol=1e-14)


ONE = jnp.zeros((1, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"estimator": "k4"},
            r"estimator: got 'k4', expected one of none, k1, abs, k2, k3, low_var_kl; did you mean 'k3'\?",
        ),
        ({"estimator": "low_var"}, r"did you mean 'low_var_kl'\?"),
        ({"gradient": "values"}, r"gradient: got 'values', expected one of value, k2, .*none; did you mean 'value'\?"),
        ({"max_ratio": 2.0}, r"max_ratio: .*needs sampling_log_probs"),
        ({"sampling_log_probs": ONE, "max_ratio": 0.0}, r"max_ratio: got 0\.0, expected a number > 0"),
        ({"value_clip": -1.0}, r"value_clip: got -1\.0, expected a number > 0"),
        ({"log_ratio_clip": 0}, r"log_ratio_clip: got 0, expected a number > 0"),
        ({"sampling_log_probs": jnp.zeros((2, 2))}, r"shapes differ: .*sampling_log_probs \[2, 2\]"),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kljax.estimate_kl(ONE, ONE, **arguments)


def test_shape_errors_name_every_argument() -> None:
    for function in (kljax.k1, kljax.abs_diff, kljax.k2, kljax.k3, kljax.low_var_kl):
        with pytest.raises(ValueError, match=r"log_probs \[1, 2\], ref_log_probs \[2, 2\].*same shape"):
            function(ONE, jnp.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"shapes differ: log_probs \[1, 2\], ref_log_probs \[1, 2\], mask \[2\];"):
        kljax.estimate_kl(ONE, ONE, jnp.ones(2, bool))
    with pytest.raises(TypeError, match=r"mask: got dtype float64"):
        kljax.estimate_kl(ONE, ONE, jnp.ones((1, 2)))


def test_importance_corrected_k3_is_exact_at_underflow() -> None:
    """w * k3 has the gradient w * x; in float32 its terms of 1e8 cancelled to garbage, or to 0 * inf."""
    x = np.array([-0.5, -2.0, -15.0, -20.0, -100.0, -300.0])
    sampling = np.array([-0.2, -0.5, -1.0, -2.0, -1.0, -3.0])
    log_probs = sampling + x
    log_weight = log_probs - sampling
    ref = log_probs - x
    function = functools.partial(kljax.estimate_kl, estimator="k3")

    def total(lp: jax.Array) -> jax.Array:
        f32 = [jnp.asarray(a, jnp.float32) for a in (ref, sampling)]
        return function(lp, f32[0], sampling_log_probs=f32[1]).sum()

    lp32 = jnp.asarray(log_probs, jnp.float32)
    rounded = np.asarray(lp32, np.float64)
    exact_x = rounded - np.asarray(np.float32(ref), np.float64)
    exact_w = np.exp(rounded - np.asarray(np.float32(sampling), np.float64))
    # A ratio below the smallest normal float32 is 0 there; times x it is under 1e-35.
    np.testing.assert_allclose(jax.grad(total)(lp32), exact_w * exact_x, rtol=2e-6, atol=1e-35)
    value = function(lp32, jnp.asarray(ref, jnp.float32), sampling_log_probs=jnp.asarray(sampling, jnp.float32))
    expected = np.exp(log_weight - x) + np.exp(log_weight) * (x - 1)
    np.testing.assert_allclose(value, expected, rtol=2e-6)
