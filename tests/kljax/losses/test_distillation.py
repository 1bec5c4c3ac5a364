"""Divergences over vocabularies against sums in extended precision, and what float32 keeps of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

import kljax
from tests.masks import MASK, check_masked, draw

RNG = np.random.default_rng(0)
POLICY, TEACHER = (log_softmax(2 * RNG.normal(size=(*MASK.shape, 6)), -1) for _ in range(2))
BETAS = [0.0, 1e-3, 0.3, 1.0]


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
    got = kljax.generalized_jsd(POLICY, TEACHER, MASK, beta=beta)
    np.testing.assert_allclose(got, np.where(MASK, exact(POLICY, TEACHER, beta), 0), 1e-12, 1e-15)
    logits = jnp.asarray(POLICY + 3.0)
    gradient = jax.grad(lambda z: kljax.generalized_jsd(jax.nn.log_softmax(z), TEACHER, MASK, beta=beta).sum())(logits)
    np.testing.assert_allclose(gradient, np.where(MASK[..., None], slope(logits, TEACHER, beta), 0), 1e-10, 1e-14)
    traced = jax.jit(lambda b: kljax.generalized_jsd(POLICY, TEACHER, MASK, beta=b))(jnp.asarray(beta))
    np.testing.assert_allclose(traced, got, 1e-12, 1e-15)


def test_the_ends_are_the_two_kls_and_what_is_in_between_goes_to_zero() -> None:
    forward, reverse = (kljax.generalized_jsd(POLICY, TEACHER, MASK, beta=b) for b in (0, 1))
    kl = functools.partial(exact, beta=1.0)
    np.testing.assert_allclose(forward, np.where(MASK, kl(TEACHER, POLICY), 0), 1e-12)
    np.testing.assert_allclose(reverse, np.where(MASK, kl(POLICY, TEACHER), 0), 1e-12)
    for small in (1e-6, 1e-9):
        near_zero = kljax.generalized_jsd(POLICY, TEACHER, MASK, beta=small) / small
        np.testing.assert_allclose(near_zero, forward, 1e3 * small, 1e-14)
    half = kljax.generalized_jsd(POLICY, TEACHER, MASK, beta=0.5)
    np.testing.assert_allclose(half, kljax.generalized_jsd(TEACHER, POLICY, MASK, beta=0.5), 1e-12, 1e-16)
    assert (half <= np.log(2)).all()


@pytest.mark.parametrize(("traced", "dtype"), [(True, np.float32), (False, np.float64)])
def test_tokens_without_probability(traced: bool, dtype: type) -> None:
    # Of five tokens: both have some, only the policy, only the teacher, neither; and rows that share nothing.
    with np.errstate(divide="ignore"):
        policy = np.log(np.array([[0.5, 0.3, 0.0, 0.0, 0.2], [0.6, 0.4, 0.0, 0.0, 0.0]], dtype))
        teacher = np.log(np.array([[0.1, 0.0, 0.7, 0.0, 0.2], [0.0, 0.0, 0.5, 0.25, 0.25]], dtype))
    mask = np.ones(2, bool)
    rtol = 1e-6 if dtype == np.float32 else 1e-12

    def divergence(log_probs: jax.Array, beta: float) -> jax.Array:
        return kljax.generalized_jsd(log_probs, teacher, mask, beta=jnp.asarray(beta, dtype) if traced else beta)

    for beta in (0.1, 0.5):
        np.testing.assert_allclose(divergence(policy, beta), exact(policy, teacher, beta), rtol)
        gradient = jax.grad(lambda z, b=beta: divergence(jax.nn.log_softmax(z), b).sum())(jnp.asarray(policy))
        np.testing.assert_allclose(gradient, slope(policy, teacher, beta), 10 * rtol, rtol)
    # A KL is infinite where it has no probability to compare with, and finite where only its own is 0.
    np.testing.assert_array_equal(divergence(policy, 0.0), np.inf)
    np.testing.assert_array_equal(divergence(policy, 1.0), np.inf)
    full = np.log(np.full((2, 5), 0.2, dtype))
    covered = kljax.generalized_jsd(full, teacher, mask, beta=jnp.asarray(0.0, dtype) if traced else 0.0)
    np.testing.assert_allclose(covered, exact(full, teacher, 0.0), rtol)
    backward = jax.grad(
        lambda z: kljax.generalized_jsd(
            jax.nn.log_softmax(z), full, mask, beta=jnp.asarray(1.0, dtype) if traced else 1.0
        ).sum()
    )(jnp.asarray(policy))
    np.testing.assert_allclose(backward, slope(policy, full, 1.0), 10 * rtol, rtol)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("distance", [1e-2, 1e-4])
def test_float32_near_the_teacher(distance: float, beta: float) -> None:
    logits = np.random.default_rng(1).normal(size=(8, 4000))
    other = logits + distance * np.random.default_rng(2).normal(size=logits.shape)
    policy, teacher = (np.asarray(log_softmax(z, -1), np.float32) for z in (logits, other))
    got = kljax.generalized_jsd(policy, teacher, np.ones(8, bool), beta=beta)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact(policy, teacher, beta), 1e-4)
    if beta == 1.0 and distance == 1e-4:
        naive = (np.exp(policy) * (policy - teacher)).sum(-1)
        assert np.abs(naive / exact(policy, teacher, beta) - 1).max() > 1


def test_float32_far_from_the_teacher_is_finite() -> None:
    logits, other = np.float32([[0.0, 120.0, -90.0]]), np.float32([[130.0, 0.0, -20.0]])
    policy, teacher = (np.asarray(log_softmax(np.float64(z), -1), np.float32) for z in (logits, other))
    mask = np.ones(1, bool)
    for beta in BETAS:
        value, gradient = jax.value_and_grad(
            lambda z, b=beta: kljax.generalized_jsd(jax.nn.log_softmax(z), teacher, mask, beta=b).sum()
        )(jnp.asarray(logits))
        np.testing.assert_allclose(value, exact(policy, teacher, beta)[0], 1e-6)
        np.testing.assert_allclose(gradient, slope(logits, teacher, beta), 1e-5, 1e-6)


def test_what_is_masked_counts_in_nothing() -> None:
    for beta in (0.0, 0.5, 1.0):
        policy, teacher = (np.where(MASK[..., None], x, np.nan) for x in (POLICY, TEACHER))
        value, gradient = jax.value_and_grad(
            lambda x, t, b=beta: kljax.generalized_jsd(x, t, MASK, beta=b).sum(), (0, 1)
        )(policy, teacher)
        assert np.isfinite(value)
        for array in gradient:
            np.testing.assert_array_equal(array[~MASK], 0)
    value, gradient = jax.value_and_grad(lambda x: kljax.top_k_forward_kl(x, TEACHER, MASK).sum())(policy)
    assert np.isfinite(value)
    np.testing.assert_array_equal(gradient[~MASK], 0)


@pytest.mark.parametrize("gap", [1e-2, 1e-6, 1e-30])
def test_a_small_tail_is_exact_in_float32(gap: float) -> None:
    tail = np.array([0.5, 0.3, 0.2]) * gap
    log_probs = np.asarray(np.log(np.concatenate([tail[:1], [0.7, 0.3 * (1 - gap / 0.3)], tail[1:]])), np.float32)
    got = kljax.top_k_with_tail(log_probs, np.array([2, 1]))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got[:2], log_probs[[2, 1]])
    np.testing.assert_allclose(np.exp(np.float64(got[2])), np.exp(np.float64(log_probs[[0, 3, 4]])).sum(), 1e-5)
    gradient = jax.grad(lambda x: kljax.top_k_with_tail(x, np.array([2, 1]))[2])(jnp.asarray(log_probs))
    np.testing.assert_allclose(gradient, [0.5, 0, 0, 0.3, 0.2], 1e-5, 1e-7)


def test_the_tail_of_a_whole_vocabulary_is_empty() -> None:
    log_probs = jnp.log(jnp.array([[0.5, 0.25, 0.25, 0.0]]))
    for indices in ([[0, 1, 2]], [[3, 2, 1, 0]]):
        value, pull = jax.vjp(lambda x, i=indices: kljax.top_k_with_tail(x, jnp.array(i)), log_probs)
        assert value[0, -1] == -jnp.inf
        np.testing.assert_array_equal(pull(jnp.ones_like(value))[0], [[float(i in indices[0]) for i in range(4)]])


def test_rows_with_a_tail_are_distributions_whose_divergence_is_a_lower_bound() -> None:
    indices = np.argsort(-TEACHER, -1)[..., :3]
    shortened = [kljax.top_k_with_tail(x, indices) for x in (POLICY, TEACHER)]
    for rows, whole in zip(shortened, (POLICY, TEACHER), strict=True):
        np.testing.assert_allclose(logsumexp(rows, -1), 0, atol=1e-14)
        np.testing.assert_allclose(rows[..., :3], np.take_along_axis(whole, indices, -1), 1e-15)
        tail = 1 - np.exp(np.take_along_axis(whole, indices, -1)).sum(-1)
        np.testing.assert_allclose(np.exp(rows[..., 3]), tail, 1e-10)
        np.testing.assert_allclose(kljax.append_tail(rows[..., :3]), rows, 1e-10)
    for beta in BETAS:
        below = kljax.generalized_jsd(*shortened, MASK, beta=beta)
        assert (below <= kljax.generalized_jsd(POLICY, TEACHER, MASK, beta=beta) + 1e-15).all()


def test_a_tail_without_the_vocabulary() -> None:
    log_probs = np.asarray(np.log([[2.5e-7, 1 - 1e-6, 1.5e-7]]), np.float32)
    got = kljax.append_tail(log_probs)
    exactly = -np.expm1(np.float64(log_probs[0, 1])) - np.exp(np.float64(log_probs[0, [0, 2]])).sum()
    np.testing.assert_allclose(np.exp(np.float64(got[0, 3])), exactly, 1e-5)
    # TRL's bound, unused entries, and a sum that rounding took beyond 1.
    np.testing.assert_allclose(kljax.append_tail(jnp.array([0.0, -jnp.inf])), [0, -np.inf, np.log(1e-7)], 1e-6)
    np.testing.assert_allclose(kljax.append_tail(jnp.array([-jnp.inf, -jnp.inf])), [-np.inf, -np.inf, 0], 1e-6)
    for row in ([-0.5, -0.5, -3.0], [0.0, -jnp.inf, -jnp.inf]):
        gradient = jax.grad(lambda x: kljax.append_tail(x, min_mass=1e-3)[-1])(jnp.array(row))
        np.testing.assert_array_equal(gradient, 0)
    row = jnp.log(jnp.array([0.5, 0.25]))
    np.testing.assert_allclose(jax.grad(lambda x: kljax.append_tail(x)[-1])(row), [-2, -1], 1e-12)


def test_forward_kl_over_the_largest_tokens() -> None:
    indices = np.argsort(-POLICY, -1)[..., :3]
    policy, teacher = (np.take_along_axis(x, indices, -1) for x in (POLICY, TEACHER))
    raw = (np.exp(teacher) * (teacher - policy)).sum(-1)
    assert (raw[MASK] < 0).any()
    value, pull = jax.vjp(lambda x: kljax.top_k_forward_kl(x, teacher, MASK), jnp.asarray(policy))
    np.testing.assert_allclose(value, np.where(MASK, np.maximum(raw, 0), 0), 1e-12)
    counts = (MASK & (raw > 0))[..., None]
    np.testing.assert_allclose(pull(jnp.ones_like(value))[0], np.where(counts, -np.exp(teacher), 0), 1e-12)
    low = kljax.top_k_forward_kl(policy, teacher, MASK, min_log_prob=-1.0)
    p, q = np.maximum(policy, -1.0), np.maximum(teacher, -1.0)
    np.testing.assert_allclose(low, np.where(MASK, np.maximum((np.exp(q) * (q - p)).sum(-1), 0), 0), 1e-12, 1e-15)
    sparse = kljax.top_k_forward_kl(np.array([[-np.inf, -1.0]]), np.array([[-np.inf, -0.5]]), np.array([True]))
    np.testing.assert_allclose(sparse, [0.5 * np.exp(-0.5)], 1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"estimator": "k1"}, {"estimator": "low_var_kl", "gradient": "value"}], ids=str
)
def test_distillation_loss_is_the_kl_to_the_teacher(options: dict[str, str]) -> None:
    log_probs, teacher = draw(1.0, 1.0)
    got = jax.value_and_grad(lambda x: kljax.distillation_loss(x, teacher, MASK, **options).sum())(log_probs)
    expected = jax.value_and_grad(lambda x: kljax.reference_kl_loss(x, teacher, MASK, **options).sum())(log_probs)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    check_masked(lambda *x: kljax.distillation_loss(*x, MASK, **options), [log_probs, teacher])
    if options.get("estimator") == "k1":
        np.testing.assert_allclose(got[1], np.where(MASK, log_probs - teacher, 0), 1e-14)


def test_distillation_to_the_teacher_lowers_the_divergence_in_expectation() -> None:
    # Over all tokens of one position: the expected gradient of the sampled loss is that of KL(policy || teacher).
    logits, teacher = jnp.asarray(POLICY[1, 0]), TEACHER[1, 0]
    weights = jax.lax.stop_gradient(jax.nn.softmax(logits))

    def sampled(z: jax.Array) -> jax.Array:
        return (weights * kljax.distillation_loss(jax.nn.log_softmax(z), teacher, np.ones(6, bool))).sum()

    value, gradient = jax.value_and_grad(sampled)(logits)
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
