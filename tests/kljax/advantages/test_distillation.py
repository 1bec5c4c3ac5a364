import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, check_masked, draw

ADVANTAGES, POLICY, OTHER = draw(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "shifted",
    [
        lambda *arrays: kljax.distillation_advantages(*arrays, MASK, coef=0.3),
        lambda *arrays: kljax.kimi_advantages(*arrays, MASK, tau=0.3),
    ],
    ids=["distillation", "kimi"],
)
def test_advantages_less_a_log_ratio(shifted) -> None:
    expected = np.where(MASK, ADVANTAGES - 0.3 * (POLICY - OTHER), 0)
    np.testing.assert_allclose(shifted(ADVANTAGES, POLICY, OTHER), expected, 1e-13, 1e-15)
    rows = ADVANTAGES[:, 0]
    of_rows = np.where(MASK, rows[:, None] - 0.3 * (POLICY - OTHER), 0)
    np.testing.assert_allclose(shifted(rows, POLICY, OTHER), of_rows, 1e-13, 1e-15)
    check_masked(shifted, [ADVANTAGES, POLICY, OTHER])
    to_advantages, *to_log_probs = jax.grad(lambda *x: shifted(*x).sum(), (0, 1, 2))(ADVANTAGES, POLICY, OTHER)
    np.testing.assert_array_equal(to_advantages, MASK)
    np.testing.assert_array_equal(to_log_probs, 0)


def test_coefficient_zero_leaves_out_an_infinite_log_ratio() -> None:
    gone = np.full(MASK.shape, -np.inf)
    for got in (
        kljax.distillation_advantages(ADVANTAGES, POLICY, gone, MASK, coef=0.0),
        jax.jit(lambda tau: kljax.kimi_advantages(ADVANTAGES, POLICY, gone, MASK, tau=tau))(0.0),
    ):
        np.testing.assert_array_equal(got, np.where(MASK, ADVANTAGES, 0))


def test_distillation_advantages_lead_to_the_teacher_in_expectation() -> None:
    # Over all tokens of one position: the policy gradient is that of the expected reward less coef * KL(pi || teacher).
    rng = np.random.default_rng(0)
    logits, teacher, rewards = (jnp.asarray(rng.normal(size=5)) for _ in range(3))
    teacher, everything = jax.nn.log_softmax(teacher), np.ones(5, bool)

    def objective(z: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(z)
        return (jnp.exp(log_p) * (rewards - 0.3 * (log_p - teacher))).sum()

    def surrogate(z: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(z)
        advantages = kljax.distillation_advantages(rewards, log_p, teacher, everything, coef=0.3)
        return (jax.lax.stop_gradient(jnp.exp(log_p)) * advantages * log_p).sum()

    np.testing.assert_allclose(jax.grad(surrogate)(logits), jax.grad(objective)(logits), 1e-11, 1e-14)


def test_kimi_converges_to_the_exponential_of_the_advantages() -> None:
    rng = np.random.default_rng(0)
    old, advantages = jax.nn.log_softmax(jnp.asarray(rng.normal(size=5))), jnp.asarray(rng.normal(size=5))
    tau, everything = 0.5, np.ones(5, bool)
    best = jax.nn.log_softmax(old + advantages / tau)
    soft = tau * jax.nn.logsumexp(old + advantages / tau)
    left = kljax.kimi_advantages(advantages, best, old, everything, tau=tau)
    np.testing.assert_allclose(left, jnp.full(5, soft), 1e-12)  # a constant: nothing left to learn


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_jsd_as_trinity_defines_it(beta: float) -> None:
    s, t = POLICY, OTHER
    if beta in (0.0, 1.0):
        jsd = s - t if beta == 0 else t - s
    else:
        m = np.logaddexp(s + np.log(1 - beta), t + np.log(beta))
        jsd = beta * (t - m) + (1 - beta) * (s - m)
    expected = np.where(MASK, -0.7 * jsd, 0)
    np.testing.assert_allclose(kljax.jsd_advantages(s, t, MASK, beta=beta, coef=0.7), expected, 1e-12, 1e-14)
    traced = jax.jit(lambda b: kljax.jsd_advantages(s, t, MASK, beta=b, coef=0.7))(beta)
    np.testing.assert_allclose(traced, expected, 1e-12, 1e-14)
    if 0 < beta < 1:
        assert (traced >= 0).all()
    check_masked(lambda *x: kljax.jsd_advantages(*x, MASK, beta=beta), [s, t])


def test_jsd_in_float32_near_and_far() -> None:
    x = np.array([1e-4, -1e-4, 1e-2, 0.9, 1.1, -1.1, 30.0, -30.0, 200.0, -200.0], np.float32)
    mask, beta = np.ones(x.shape, bool), np.float64(0.3)
    wide = x.astype(np.longdouble)
    expected = np.log1p(beta * np.expm1(np.minimum(wide, 0)) + 0 * wide) - beta * wide
    large = wide > 0
    expected = np.where(large, (1 - beta) * wide + np.log1p((1 - beta) * np.expm1(-np.abs(wide))), expected)
    got = kljax.jsd_advantages(np.zeros_like(x), x, mask, beta=0.3)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.float64(expected), 2e-6)
    infinite = kljax.jsd_advantages(np.float32([-1.0, -np.inf]), np.float32([-np.inf, -1.0]), np.ones(2, bool))
    np.testing.assert_array_equal(infinite, np.inf)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.5])
def test_iw_opd_weighs_by_the_preceding_tokens(gamma: float) -> None:
    expected = np.zeros(MASK.shape)
    for i, mask in enumerate(MASK):
        gain = np.where(mask, OTHER[i] - POLICY[i], 0)
        for t in np.flatnonzero(mask):
            before = np.abs(gain[:t]).sum() / np.abs(gain).sum()
            expected[i, t] = gain[t] * (1 + gamma * (1 - before))
    got = kljax.iw_opd_advantages(POLICY, OTHER, MASK, gamma=gamma)
    np.testing.assert_allclose(got, expected, 1e-12, 1e-14)
    check_masked(lambda *x: kljax.iw_opd_advantages(*x, MASK, gamma=gamma), [POLICY, OTHER])
    np.testing.assert_array_equal(kljax.iw_opd_advantages(POLICY, POLICY, MASK, gamma=gamma), 0)
    if gamma == 0:
        plain = kljax.distillation_advantages(np.zeros(MASK.shape), POLICY, OTHER, MASK, coef=1.0)
        np.testing.assert_allclose(got, plain, 1e-15)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="coef: got -1"):
        kljax.distillation_advantages(ADVANTAGES, POLICY, OTHER, MASK, coef=-1)
    with pytest.raises(ValueError, match="tau: got -1"):
        kljax.kimi_advantages(ADVANTAGES, POLICY, OTHER, MASK, tau=-1)
    with pytest.raises(ValueError, match=r"beta: got 1\.5, expected a number <= 1"):
        kljax.jsd_advantages(POLICY, OTHER, MASK, beta=1.5)
    with pytest.raises(ValueError, match="gamma: got -1"):
        kljax.iw_opd_advantages(POLICY, OTHER, MASK, gamma=-1)
    with pytest.raises(ValueError, match="shapes differ: log_probs"):
        kljax.kimi_advantages(ADVANTAGES, POLICY[1:], OTHER, MASK, tau=1)
    with pytest.raises(ValueError, match="shapes differ: advantages"):
        kljax.distillation_advantages(ADVANTAGES[1:], POLICY, OTHER, MASK, coef=1)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_topd_normalises_returns_over_tokens_of_a_prompt(alpha: float) -> None:
    """The rewards of a proximal teacher, their returns and the statistics of each prompt, token by token."""
    groups, returns = np.arange(len(MASK)) % 2, np.zeros(MASK.shape)
    ratio = np.exp(OTHER - POLICY)
    rewards = np.log(alpha * ratio + 1 - alpha)
    for row, unmasked in enumerate(MASK):
        places = np.flatnonzero(unmasked)
        for number, index in enumerate(places):
            later = rewards[row][places[number + 1 :]]
            returns[row, index] = rewards[row, index] + (later.mean() if later.size else 0)
    expected = np.zeros(MASK.shape)
    for group in (0, 1):
        tokens = MASK & (groups == group)[:, None]
        expected[tokens] = (returns[tokens] - returns[tokens].mean()) / returns[tokens].std(ddof=1)

    def advantages(lp, teacher):
        return kljax.topd_advantages(lp, teacher, MASK, groups, num_groups=2, alpha=alpha)

    np.testing.assert_allclose(advantages(POLICY, OTHER), expected, 1e-11, 1e-13)
    check_masked(advantages, [POLICY, OTHER])
    slopes = jax.grad(lambda *pair: (advantages(*pair) ** 2).sum(), (0, 1))(POLICY, OTHER)
    np.testing.assert_array_equal(slopes, 0)


def test_topd_without_spread_or_teacher_is_bounded() -> None:
    same = kljax.topd_advantages(POLICY, POLICY, MASK, np.zeros(len(MASK), int), num_groups=1)
    np.testing.assert_array_equal(same, 0)
    rejected = kljax.topd_advantages(POLICY, np.where(MASK, -np.inf, 0), MASK, np.zeros(len(MASK), int), num_groups=1)
    assert np.isfinite(rejected).all()
