"""Divergences over vocabularies against sums in extended precision, and what float32 keeps of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

import kljax
from tests.kljax.calls import traced_program
from tests.masks import MASK, check_masked, draw

RNG = np.random.default_rng(0)
POLICY, TEACHER = (log_softmax(2 * RNG.normal(size=(*MASK.shape, 6)), -1) for _ in range(2))
BETAS = [0.0, 1e-3, 0.3, 1.0]


def value_and_slope(log_probs: jax.Array, teacher: jax.Array, mask: jax.Array, beta: Any) -> tuple[jax.Array, ...]:
    """The divergence, and its gradient to logits that have these log-probs, with a cotangent of 1 each."""

    def of_logits(logits: jax.Array) -> jax.Array:
        return kljax.generalized_jsd(jax.nn.log_softmax(logits), teacher, mask, beta=beta)

    pull = jax.vjp(of_logits, log_probs)[1]
    value = kljax.generalized_jsd(log_probs, teacher, mask, beta=beta)
    return value, pull(jnp.ones_like(value))[0]


JSD = traced_program(kljax.generalized_jsd, static_argnames=("beta",))
VALUE_AND_SLOPE = traced_program(value_and_slope, static_argnames=("beta",))
TRACED = jax.jit(value_and_slope)


def exact(policy: np.ndarray, teacher: np.ndarray, beta: float) -> np.ndarray:
    """The definition, in extended precision, of rows normalised there."""
    p, q = (np.exp(np.asarray(x, np.longdouble)) for x in (policy, teacher))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)

    def kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(a > 0, a * np.log(a / b), 0).sum(-1)

    if beta in (0.0, 1.0):
        return np.asarray(kl(q, p) if beta == 0 else kl(p, q), np.float64)
    mixed = (1 - beta) * p + beta * q
    return np.asarray(beta * kl(q, mixed) + (1 - beta) * kl(p, mixed), np.float64)


def slope(logits: np.ndarray, teacher: np.ndarray, beta: float) -> np.ndarray:
    """Its gradient to the logits, `p (g - sum_v p_v g_v)` with `g` the gradient to the probabilities."""
    p, q = np.exp(log_softmax(np.asarray(logits, np.float64), -1)), np.exp(np.asarray(teacher, np.float64))
    q = q / q.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        if beta == 0:
            return p - q
        g = np.log(p / q) if beta == 1 else (1 - beta) * np.log(p / ((1 - beta) * p + beta * q))
        pg = np.where(p > 0, p * g, 0)
    return pg - p * pg.sum(-1, keepdims=True)


@pytest.mark.parametrize("beta", BETAS)
def test_generalized_jsd_and_its_gradient_to_the_logits(beta: float) -> None:
    got, gradient = VALUE_AND_SLOPE(POLICY, TEACHER, MASK, beta=beta)
    np.testing.assert_allclose(got, np.where(MASK, exact(POLICY, TEACHER, beta), 0), 1e-12, 1e-15)
    np.testing.assert_allclose(gradient, np.where(MASK[..., None], slope(POLICY, TEACHER, beta), 0), 1e-10, 1e-14)
    np.testing.assert_allclose(TRACED(POLICY, TEACHER, MASK, beta)[0], got, 1e-12, 1e-15)


def test_divergence_ends_are_the_two_kls() -> None:
    forward, reverse = (JSD(POLICY, TEACHER, MASK, beta=b) for b in (0, 1))
    kl = functools.partial(exact, beta=1.0)
    np.testing.assert_allclose(forward, np.where(MASK, kl(TEACHER, POLICY), 0), 1e-12)
    np.testing.assert_allclose(reverse, np.where(MASK, kl(POLICY, TEACHER), 0), 1e-12)
    traced = jax.jit(kljax.generalized_jsd)
    for small in (1e-6, 1e-9):
        near_zero = np.asarray(traced(POLICY, TEACHER, MASK, beta=small)) / small
        np.testing.assert_allclose(near_zero, forward, 1e3 * small, 1e-14)
    half = np.asarray(traced(POLICY, TEACHER, MASK, beta=0.5))
    np.testing.assert_allclose(half, traced(TEACHER, POLICY, MASK, beta=0.5), 1e-12, 1e-16)
    assert (half <= np.log(2)).all()


@pytest.mark.parametrize(("traced", "dtype"), [(True, np.float32), (False, np.float64)])
def test_tokens_without_probability(traced: bool, dtype: type) -> None:
    # Of five tokens: both have some, only the policy, only the teacher, neither; and rows that share nothing.
    with np.errstate(divide="ignore"):
        policy = np.log(np.array([[0.5, 0.3, 0.0, 0.0, 0.2], [0.6, 0.4, 0.0, 0.0, 0.0]], dtype))
        teacher = np.log(np.array([[0.1, 0.0, 0.7, 0.0, 0.2], [0.0, 0.0, 0.5, 0.25, 0.25]], dtype))
    mask = np.ones(2, bool)
    rtol = 1e-6 if dtype == np.float32 else 1e-12

    def both(log_probs: np.ndarray, teacher: np.ndarray, beta: float) -> tuple[jax.Array, jax.Array]:
        """The divergence from log-probs as they are, and the gradient to logits that have them."""
        run = TRACED if traced else VALUE_AND_SLOPE
        return run(log_probs, teacher, mask, beta=dtype(beta) if traced else beta)

    for beta in (0.1, 0.5):
        value, gradient = both(policy, teacher, beta)
        np.testing.assert_allclose(value, exact(policy, teacher, beta), rtol)
        np.testing.assert_allclose(gradient, slope(policy, teacher, beta), 10 * rtol, rtol)
    # A KL is infinite where it has no probability to compare with, and finite where only its own is 0.
    np.testing.assert_array_equal(both(policy, teacher, 0.0)[0], np.inf)
    np.testing.assert_array_equal(both(policy, teacher, 1.0)[0], np.inf)
    full = np.log(np.full((2, 5), 0.2, dtype))
    np.testing.assert_allclose(both(full, teacher, 0.0)[0], exact(full, teacher, 0.0), rtol)
    np.testing.assert_allclose(both(policy, full, 1.0)[1], slope(policy, full, 1.0), 10 * rtol, rtol)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("distance", [1e-2, 1e-4])
def test_float32_near_the_teacher(distance: float, beta: float) -> None:
    logits = np.random.default_rng(1).normal(size=(8, 4000))
    other = logits + distance * np.random.default_rng(2).normal(size=logits.shape)
    policy, teacher = (np.asarray(log_softmax(z, -1), np.float32) for z in (logits, other))
    got = JSD(policy, teacher, np.ones(8, bool), beta=beta)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact(policy, teacher, beta), 1e-4)
    if beta == 1.0 and distance == 1e-4:
        naive = (np.exp(policy) * (policy - teacher)).sum(-1)
        assert np.abs(naive / exact(policy, teacher, beta) - 1).max() > 1


def test_float32_far_from_the_teacher_is_finite() -> None:
    logits, other = np.float32([[0.0, 120.0, -90.0]]), np.float32([[130.0, 0.0, -20.0]])
    policy, teacher = (np.asarray(log_softmax(np.float64(z), -1), np.float32) for z in (logits, other))
    mask = np.ones(1, bool)

    @functools.partial(jax.jit, static_argnames="beta")
    def value_and_grad(logits: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
        def total(z: jax.Array) -> jax.Array:
            return kljax.generalized_jsd(jax.nn.log_softmax(z), teacher, mask, beta=beta).sum()

        return jax.value_and_grad(total)(logits)

    for beta in BETAS:
        value, gradient = value_and_grad(logits, beta=beta)
        np.testing.assert_allclose(value, exact(policy, teacher, beta)[0], 1e-6)
        np.testing.assert_allclose(gradient, slope(logits, teacher, beta), 1e-5, 1e-6)


def test_masked_tokens_count_in_nothing() -> None:
    @jax.jit
    def run(*pair: jax.Array) -> list[Any]:
        totals = [lambda x, t, b=b: kljax.generalized_jsd(x, t, MASK, beta=b).sum() for b in (0.0, 0.5, 1.0)]
        totals.append(lambda x, t: kljax.top_k_forward_kl(x, t, MASK).sum())
        return [jax.value_and_grad(total, (0, 1))(*pair) for total in totals]

    for value, gradients in run(*(np.where(MASK[..., None], x, np.nan) for x in (POLICY, TEACHER))):
        assert np.isfinite(value)
        for array in gradients:
            np.testing.assert_array_equal(array[~MASK], 0)


@pytest.mark.parametrize("gap", [1e-2, 1e-6, 1e-30])
def test_a_small_tail_is_exact_in_float32(gap: float) -> None:
    tail = np.array([0.5, 0.3, 0.2]) * gap
    log_probs = np.asarray(np.log(np.concatenate([tail[:1], [0.7, 0.3 * (1 - gap / 0.3)], tail[1:]])), np.float32)
    with_tail = jax.jit(lambda x: kljax.top_k_with_tail(x, np.array([2, 1])))
    got = with_tail(log_probs)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got[:2], log_probs[[2, 1]])
    np.testing.assert_allclose(np.exp(np.float64(got[2])), np.exp(np.float64(log_probs[[0, 3, 4]])).sum(), 1e-5)
    gradient = jax.jit(jax.grad(lambda x: with_tail(x)[2]))(log_probs)
    np.testing.assert_allclose(gradient, [0.5, 0, 0, 0.3, 0.2], 1e-5, 1e-7)


def test_narrow_indices_reach_a_wide_vocabulary() -> None:
    log_probs = np.full((1, 200), -np.log(200))
    np.testing.assert_allclose(np.exp(kljax.top_k_with_tail(log_probs, np.array([[100]], np.int8))), [[0.005, 0.995]])


def test_the_tail_of_a_whole_vocabulary_is_empty() -> None:
    with np.errstate(divide="ignore"):
        log_probs = np.log([[0.5, 0.25, 0.25, 0.0]])

    @jax.jit
    def value_and_pulled(log_probs: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, pull = jax.vjp(lambda x: kljax.top_k_with_tail(x, indices), log_probs)
        return value, pull(jnp.ones_like(value))[0]

    for indices in ([[0, 1, 2]], [[3, 2, 1, 0]]):
        value, pulled = value_and_pulled(log_probs, np.array(indices))
        assert value[0, -1] == -jnp.inf
        np.testing.assert_array_equal(pulled, [[float(i in indices[0]) for i in range(4)]])


def test_rows_with_a_tail_give_a_lower_bound() -> None:
    indices = np.argsort(-TEACHER, -1)[..., :3]
    with_tail, append = jax.jit(kljax.top_k_with_tail), jax.jit(kljax.append_tail)
    shortened = [np.asarray(with_tail(x, indices)) for x in (POLICY, TEACHER)]
    for rows, full in zip(shortened, (POLICY, TEACHER), strict=True):
        np.testing.assert_allclose(logsumexp(rows, -1), 0, atol=1e-14)
        np.testing.assert_allclose(rows[..., :3], np.take_along_axis(full, indices, -1), 1e-15)
        tail = 1 - np.exp(np.take_along_axis(full, indices, -1)).sum(-1)
        np.testing.assert_allclose(np.exp(rows[..., 3]), tail, 1e-10)
        np.testing.assert_allclose(append(rows[..., :3]), rows, 1e-10)
    for beta in BETAS:
        below = np.asarray(JSD(*shortened, MASK, beta=beta))
        assert (below <= np.asarray(JSD(POLICY, TEACHER, MASK, beta=beta)) + 1e-15).all()


def test_a_tail_without_the_vocabulary() -> None:
    log_probs = np.asarray(np.log([[2.5e-7, 1 - 1e-6, 1.5e-7]]), np.float32)
    append = jax.jit(kljax.append_tail)
    got = append(log_probs)
    exactly = -np.expm1(np.float64(log_probs[0, 1])) - np.exp(np.float64(log_probs[0, [0, 2]])).sum()
    np.testing.assert_allclose(np.exp(np.float64(got[0, 3])), exactly, 1e-5)
    # TRL's bound, unused entries, and a sum that rounding took beyond 1.
    np.testing.assert_allclose(append(np.array([0.0, -np.inf])), [0, -np.inf, np.log(1e-7)], 1e-6)
    np.testing.assert_allclose(append(np.array([-np.inf, -np.inf])), [-np.inf, -np.inf, 0], 1e-6)
    slope_of_bounded = jax.jit(jax.grad(lambda x: kljax.append_tail(x, min_mass=1e-3)[-1]))
    for row in ([-0.5, -0.5, -3.0], [0.0, -np.inf, -np.inf]):
        np.testing.assert_array_equal(slope_of_bounded(np.array(row)), 0)
    gradient = jax.jit(jax.grad(lambda x: append(x)[-1]))(np.log([0.5, 0.25]))
    np.testing.assert_allclose(gradient, [-2, -1], 1e-12)


def test_forward_kl_over_the_largest_tokens() -> None:
    indices = np.argsort(-POLICY, -1)[..., :3]
    policy, teacher = (np.take_along_axis(x, indices, -1) for x in (POLICY, TEACHER))
    raw = (np.exp(teacher) * (teacher - policy)).sum(-1)
    assert (raw[MASK] < 0).any()

    @jax.jit
    def run(policy: jax.Array) -> tuple[jax.Array, ...]:
        value, pull = jax.vjp(lambda x: kljax.top_k_forward_kl(x, teacher, MASK), policy)
        bounded = kljax.top_k_forward_kl(policy, teacher, MASK, min_log_prob=-1.0)
        return value, pull(jnp.ones_like(value))[0], bounded

    value, gradient, low = run(policy)
    np.testing.assert_allclose(value, np.where(MASK, np.maximum(raw, 0), 0), 1e-12)
    counts = (MASK & (raw > 0))[..., None]
    np.testing.assert_allclose(gradient, np.where(counts, -np.exp(teacher), 0), 1e-12)
    p, q = np.maximum(policy, -1.0), np.maximum(teacher, -1.0)
    np.testing.assert_allclose(low, np.where(MASK, np.maximum((np.exp(q) * (q - p)).sum(-1), 0), 0), 1e-12, 1e-15)
    sparse = kljax.top_k_forward_kl(np.array([[-np.inf, -1.0]]), np.array([[-np.inf, -0.5]]), np.array([True]))
    np.testing.assert_allclose(sparse, [0.5 * np.exp(-0.5)], 1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"estimator": "k1"}, {"estimator": "low_var_kl", "gradient": "value"}], ids=str
)
def test_distillation_loss_is_the_kl_to_the_teacher(options: dict[str, str]) -> None:
    log_probs, teacher = draw(1.0, 1.0)

    @jax.jit
    def both(log_probs: jax.Array) -> list[Any]:
        losses = kljax.distillation_loss, kljax.reference_kl_loss
        return [jax.value_and_grad(lambda x, f=f: f(x, teacher, MASK, **options).sum())(log_probs) for f in losses]

    got, expected = both(log_probs)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    check_masked(lambda *x: kljax.distillation_loss(*x, MASK, **options), [log_probs, teacher])
    if options.get("estimator") == "k1":
        np.testing.assert_allclose(got[1], np.where(MASK, log_probs - teacher, 0), 1e-14)


def test_distillation_lowers_the_divergence_in_expectation() -> None:
    # Over all tokens of one position: the expected gradient of the sampled loss is that of KL(policy || teacher).
    logits, teacher = POLICY[1, 0], TEACHER[1, 0]

    def sampled(z: jax.Array) -> jax.Array:
        weights = jax.lax.stop_gradient(jax.nn.softmax(z))
        return (weights * kljax.distillation_loss(jax.nn.log_softmax(z), teacher, np.ones(6, bool))).sum()

    value, gradient = jax.jit(jax.value_and_grad(sampled))(logits)
    np.testing.assert_allclose(value, exact(POLICY[1, 0], teacher, 1.0), 1e-12)
    np.testing.assert_allclose(gradient, slope(logits, teacher, 1.0), 1e-10, 1e-14)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="beta: got 2, expected a number <= 1"):
        kljax.generalized_jsd(POLICY, TEACHER, MASK, beta=2)
    with pytest.raises(ValueError, match=r"beta: got -0\.5"):
        kljax.generalized_jsd(POLICY, TEACHER, MASK, beta=-0.5)
    with pytest.raises(ValueError, match=r"mask: got shape \[6, 7, 6\], expected \[6, 7\]"):
        kljax.generalized_jsd(POLICY, TEACHER, np.ones(POLICY.shape, bool))
    with pytest.raises(ValueError, match="shapes differ: vocab_log_probs"):
        kljax.generalized_jsd(POLICY, TEACHER[..., 1:], MASK)
    with pytest.raises(ValueError, match="shapes differ: top_log_probs"):
        kljax.top_k_forward_kl(POLICY, TEACHER[..., 1:], MASK)
    with pytest.raises(ValueError, match=r"indices: got shape \[3\], expected \[6, 7\]"):
        kljax.top_k_with_tail(POLICY, np.arange(3))
    with pytest.raises(TypeError, match="indices: got dtype float64"):
        kljax.top_k_with_tail(POLICY[0, 0], np.ones(2))
    with pytest.raises(ValueError, match="min_mass: got 0"):
        kljax.append_tail(POLICY, min_mass=0)
