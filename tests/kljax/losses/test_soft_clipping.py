import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.kljax.losses.pointwise import ADV, LP, MASK, OLD, WEIGHTS, D, N, R, check_far, check_pointwise
from tests.masks import check_masked

ONES = np.ones(9, bool)
ROW_ADV = np.broadcast_to(ADV[:, :1], ADV.shape)
TAU = np.where(ADV > 0, 1.5, 2.5)
TAUS = {"tau_positive": 1.5, "tau_negative": 2.5}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_sapo() -> None:
    # 1 - s would lose its digits where the gate is nearly 1.
    s, closed = sigmoid(TAU * (R - 1)), sigmoid(TAU * (1 - R))
    check_pointwise(
        lambda lp, old, adv: kljax.sapo_loss(lp, old, adv, MASK, **TAUS),
        -ADV * 4 / TAU * s,
        -ADV * 4 * s * closed * R,
    )
    check_pointwise(
        lambda lp, old, adv: kljax.sapo_loss(lp, old, adv, MASK, **TAUS, through="log_prob"),
        -ADV * 4 / TAU * s * LP,
        -ADV * 4 / TAU * s,
    )


def test_sapo_clips_the_log_ratio() -> None:
    inside = np.abs(D) <= 0.5
    s = sigmoid(TAU * (np.exp(np.clip(D, -0.5, 0.5)) - 1))
    check_pointwise(
        lambda lp, old, adv: kljax.sapo_loss(lp, old, adv, MASK, **TAUS, log_ratio_clip=0.5),
        -ADV * 4 / TAU * s,
        np.where(inside, -ADV * 4 * s * (1 - s) * R, 0),
    )


def test_sapo_with_the_ratio_of_the_row() -> None:
    ratio = np.exp(np.where(MASK, D, 0).sum(-1, keepdims=True) / N)
    s = sigmoid(TAU * (ratio - 1))

    def loss(lp: jax.Array, old: jax.Array, adv: jax.Array) -> jax.Array:
        return kljax.sapo_loss(lp, old, adv, MASK, **TAUS, level="geometric")

    np.testing.assert_allclose(loss(LP, OLD, ADV), np.where(MASK, -ADV * 4 / TAU * s, 0), 1e-12)
    per_token = np.where(MASK, -ADV * WEIGHTS * 4 * s * (1 - s) * ratio, 0)
    gradient = jax.grad(lambda lp: (loss(lp, OLD, ADV) * WEIGHTS).sum())(jnp.asarray(LP))
    np.testing.assert_allclose(gradient, np.where(MASK, per_token.sum(-1, keepdims=True) / N, 0), 1e-11, 1e-14)
    check_masked(loss, [LP, OLD, ADV])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("through", ["ratio", "log_prob"])
def test_sapo_gate_saturates_at_far_log_ratios(dtype: type, through: str) -> None:
    value, slope = check_far(lambda lp, old, adv: kljax.sapo_loss(lp, old, adv, ONES, through=through), dtype)
    if through == "ratio":
        np.testing.assert_allclose(value[2::3], [4 / 1.05, 0, -4], 1e-6)
        np.testing.assert_allclose(
            value[::3], [4 / 1.05 * sigmoid(np.array(-1.05)), 0, -4 * sigmoid(np.array(-1.0))], 1e-6
        )
        np.testing.assert_array_equal(slope[2::3], 0)
        np.testing.assert_allclose(slope[::3], 0, atol=1e-6)
        np.testing.assert_allclose(slope[1::3], [1, 0, -1], 1e-6)


def test_sapo_slope_where_the_ratio_overflows() -> None:
    @functools.partial(jax.jit, static_argnums=1)
    def slope(lp: jax.Array, tau: float) -> jax.Array:
        return jax.grad(lambda lp: kljax.sapo_loss(lp, 0 * lp, lp / lp, np.ones(1, bool), tau_positive=tau).sum())(lp)

    for tau in (1e-3, 1.0, 50.0):
        assert slope(np.array([5000.0]), tau)[0] == 0


SIZES = np.geomspace(1e-8, 50, 2001)
APART = np.concatenate([-SIZES, SIZES]).astype(np.float32)
# Tests compile without optimizations, see `tests.xla`, unless they ask for them.
PROGRAMS = {
    "not optimised": {},
    "optimised": {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False},
}
EACH_PROGRAM = ["not optimised", pytest.param("optimised", marks=pytest.mark.thorough)]


def in_float32(loss, program: str) -> tuple[jax.Array, jax.Array]:
    """Value and slope of `loss(log_probs)` at rows of one token each, as one kind of program."""

    def both(lp: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, pull = jax.vjp(loss, lp)
        return out[:, 0], pull(jnp.ones_like(out))[0][:, 0]

    lp = jnp.asarray(APART)[:, None]
    return jax.jit(both).lower(lp).compile(PROGRAMS[program])(lp)


def check_relative(actual: jax.Array, exact: np.ndarray) -> None:
    """Within 1e-6 of an answer in extended precision, wherever float32 has a normal number for it."""
    assert actual.dtype == jnp.float32
    counted = (np.abs(exact) > 1e-35) & (np.abs(exact) < 3e38)
    np.testing.assert_allclose(np.asarray(actual, np.longdouble)[counted], exact[counted], 1e-6)
    assert np.isfinite(actual[np.abs(exact) < 3e38]).all()


# Coefficients that are float32 numbers and ones that are not, from hardly a gate to one that is almost a step.
@pytest.mark.parametrize("program", EACH_PROGRAM)
@pytest.mark.parametrize("tau", [1e-3, 1.05, 60.0])
def test_sapo_in_float32_where_the_gate_saturates(tau: float, program: str) -> None:
    single = jnp.ones((APART.size, 1), jnp.float32)
    value, slope = in_float32(
        lambda lp: kljax.sapo_loss(lp, 0 * single, single, jnp.ones(single.shape, bool), tau_positive=tau), program
    )
    drift = APART.astype(np.longdouble)
    tail = np.exp(-np.abs(np.longdouble(tau) * np.expm1(drift)))
    check_relative(value, -4 / np.longdouble(tau) * np.where(drift > 0, 1, tail) / (1 + tail))
    check_relative(slope, -4 * np.exp(drift) * tail / (1 + tail) ** 2)


@pytest.mark.parametrize("program", EACH_PROGRAM)
@pytest.mark.parametrize(("k", "rate"), [(2.0, 3.0), (1.3, 0.7), (0.1, 40.7), (2.0, 80.0)])
def test_vespo_in_float32_where_phi_is_nearly_0(k: float, rate: float, program: str) -> None:
    single = jnp.ones((APART.size, 1), jnp.float32)
    options = {"k_positive": k, "lambda_positive": rate}
    value, slope = in_float32(
        lambda lp: kljax.vespo_loss(lp, 0 * single, single, jnp.ones(single.shape, bool), **options), program
    )
    drift = APART.astype(np.longdouble)
    phi = np.exp(np.longdouble(k) * drift - np.longdouble(rate) * np.expm1(drift))
    check_relative(value, -phi * drift)
    check_relative(slope, -phi)


def test_traced_coefficients_equal_float32() -> None:
    lp = jnp.asarray(APART)[:, None]
    zero, mask = jnp.zeros_like(lp), jnp.ones(lp.shape, bool)
    losses = ((kljax.sapo_loss, "tau_positive"), (kljax.vespo_loss, "lambda_positive"))
    arguments = np.float32(0.3)

    @jax.jit
    def of_both(traced: jax.Array) -> list[list[jax.Array]]:
        numbers = (traced, float(arguments))
        return [[loss(lp, zero, zero + 1, mask, **{name: x}) for x in numbers] for loss, name in losses]

    for traced, static in of_both(arguments):
        np.testing.assert_allclose(traced, static, 1e-6)


def clipped(advantages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """GMPO's log-ratios as printed, with the sign taken out and put back, and where they move."""
    sign = np.sign(advantages)
    bounded = sign * np.minimum(sign * D, sign * np.clip(D, -0.3, 0.5))
    return bounded, (bounded == D) & (sign != 0)


@pytest.mark.parametrize("advantages", [ROW_ADV, ADV, np.where(ADV > 1, 0, ROW_ADV)])
def test_gmpo(advantages: np.ndarray) -> None:
    bounded, moves = clipped(advantages)
    assert 0 < moves[MASK].sum() < MASK.sum()
    mean = np.where(MASK, bounded, 0).sum(-1, keepdims=True) / N
    row = -np.where(MASK, advantages, 0).sum(-1, keepdims=True) / N * np.exp(mean)

    def loss(lp: jax.Array, old: jax.Array, adv: jax.Array) -> jax.Array:
        return kljax.gmpo_loss(lp, old, adv, MASK, clip_low=0.3, clip_high=0.5)

    np.testing.assert_allclose(loss(LP, OLD, advantages), np.where(MASK, row, 0), 1e-12, 1e-14)
    gradient = jax.grad(lambda lp: (loss(lp, OLD, advantages) * WEIGHTS).sum())(jnp.asarray(LP))
    entering = np.where(MASK, WEIGHTS, 0).sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient, np.where(MASK & moves, row * entering / N, 0), 1e-12, 1e-14)
    check_masked(loss, [LP, OLD, advantages])


def test_gmpo_with_verl_reduction_is_the_row_mean() -> None:
    mean = np.where(MASK, clipped(ROW_ADV)[0], 0).sum(-1) / N[:, 0]
    rows = np.where(MASK.any(-1), -ROW_ADV[:, 0] * np.exp(mean), 0)
    loss = kljax.gmpo_loss(LP, OLD, ROW_ADV, MASK, clip_low=0.3, clip_high=0.5)
    reduced = kljax.aggregate(loss, MASK, mode="seq_mean_token_mean", empty_rows="count")
    np.testing.assert_allclose(reduced, rows.mean(), 1e-12)


def test_gmpo_on_its_bounds_passes_the_gradient() -> None:
    lp, mask = jnp.array([[0.5], [-0.25], [0.625], [-0.5]]), jnp.ones((4, 1), bool)
    adv = jnp.array([[1.0], [-1.0], [1.0], [-1.0]])
    gradient = jax.jit(jax.grad(lambda lp: kljax.gmpo_loss(lp, 0 * lp, adv, mask, clip_low=0.25, clip_high=0.5).sum()))(
        lp
    )
    np.testing.assert_allclose(gradient[:, 0], [-np.exp(0.5), np.exp(-0.25), 0, 0], 1e-12)


def test_gmpo_far_apart() -> None:
    mask = np.ones((3, 3), bool)

    def loss(lp: jax.Array, old: jax.Array, adv: jax.Array) -> jax.Array:
        rows = [x.reshape(3, 3) for x in (lp, old, adv)]
        return kljax.gmpo_loss(*rows, mask).ravel()

    value, _ = check_far(loss)  # each row has all three log-ratios and one advantage
    third = 1 / 3
    expected = [np.exp((-0.4 + 0 + 200) * third), 0, -np.exp((-200 + 0 + 0.4) * third)]
    np.testing.assert_allclose(value.reshape(3, 3)[:, 0], expected, 1e-12)
    zeros, up = np.zeros((1, 2), np.float32), np.full((1, 2), 200.0, np.float32)
    slope = jax.jit(jax.grad(lambda lp: kljax.gmpo_loss(lp, zeros, zeros, np.ones((1, 2), bool)).sum()))(up)
    np.testing.assert_array_equal(slope, 0)


K, RATE = np.where(ADV >= 0, 1.5, 2.5), np.where(ADV >= 0, 2.0, 0.7)
GAMMA = {"k_positive": 1.5, "lambda_positive": 2.0, "k_negative": 2.5, "lambda_negative": 0.7}


@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("weighted", [False, True])
def test_vespo(clip: float | None, weighted: bool) -> None:
    weights = np.exp(0.2 * np.sin(np.arange(MASK.size))).reshape(MASK.shape) if weighted else np.ones(MASK.shape)
    bounded = np.clip(D, -(clip or np.inf), clip or np.inf)
    w = np.prod(np.where(MASK, np.exp(bounded) * weights, 1), -1, keepdims=True)
    phi = w**K * np.exp(RATE * (1 - w))
    arguments = {"weights": np.where(MASK, weights, np.nan)} if weighted else {}
    check_pointwise(
        lambda lp, old, adv: kljax.vespo_loss(lp, old, adv, MASK, **GAMMA, **arguments, log_ratio_clip=clip),
        -ADV * phi * LP,
        -ADV * phi,
    )


def test_vespo_of_a_row_rejected_by_weights() -> None:
    weights = jnp.asarray(np.where(np.arange(MASK.shape[0])[:, None] == 3, 0.0, 1.0) * np.ones(MASK.shape))
    loss = kljax.vespo_loss(LP, OLD, ADV, MASK, weights=weights)
    np.testing.assert_array_equal(loss[3], 0)
    np.testing.assert_array_equal(loss[1], kljax.vespo_loss(LP, OLD, ADV, MASK)[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_vespo_weight_vanishes_at_far_log_ratios(dtype: type) -> None:
    # Rows of one token each: a row is all that was drawn, or nothing.
    def loss(lp: jax.Array, old: jax.Array, adv: jax.Array) -> jax.Array:
        return kljax.vespo_loss(lp[:, None], old[:, None], adv[:, None], ONES[:, None])[:, 0]

    _, slope = check_far(loss, dtype)
    np.testing.assert_allclose(slope.reshape(3, 3), [[0, 1, 0], [0, 0, 0], [0, -1, 0]], atol=1e-30)


def test_errors_name_the_argument() -> None:
    for function, options in (
        (kljax.sapo_loss, {"tau_positive": 0}),
        (kljax.sapo_loss, {"tau_negative": -1}),
        (kljax.sapo_loss, {"log_ratio_clip": 0}),
        (kljax.gmpo_loss, {"clip_low": -1}),
        (kljax.vespo_loss, {"k_negative": 0}),
        (kljax.vespo_loss, {"lambda_positive": 0}),
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: got "):
            function(LP, OLD, ADV, MASK, **options)
    with pytest.raises(ValueError, match="through: got 'pi'"):
        kljax.sapo_loss(LP, OLD, ADV, MASK, through="pi")
    with pytest.raises(ValueError, match="level: got 'row', expected one of token, sequence, geometric, average"):
        kljax.sapo_loss(LP, OLD, ADV, MASK, level="row")
    with pytest.raises(ValueError, match=r"shapes differ: weights \[6\]"):
        kljax.vespo_loss(LP, OLD, ADV, MASK, weights=ADV[:, 0])
    for function in (kljax.sapo_loss, kljax.gmpo_loss, kljax.vespo_loss):
        with pytest.raises(ValueError, match=r"advantages: got shape \[6\]"):
            function(LP, OLD, ADV[:, 0], MASK)
