"""Expected value and expected gradient of each estimator, by enumeration over a small vocabulary.

The policy is a softmax of real logits; an expectation is the sum over every token of its probability times the
estimate, with the probability held constant, as sampling does. Exact to 1e-12 in float64.
"""

import chex
import jax
import jax.numpy as jnp
import pytest

import kljax
from tests import oracles, other_seeds

VOCABULARY = 7
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module")
def logits() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits of the policy, of the reference and of a third policy that draws tokens."""
    return tuple(jax.random.normal(jax.random.key(seed), (VOCABULARY,), jnp.float64) for seed in (0, 1, 2))


def expected(logits: jax.Array, ref: jax.Array, sampler: jax.Array | None = None, **arguments: object) -> jax.Array:
    """The expectation of an estimator over tokens of the sampler (the policy itself if None), differentiable."""
    log_p, log_ref = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref)
    log_drawn = jax.lax.stop_gradient(log_p) if sampler is None else jax.nn.log_softmax(sampler)

    def estimate(token: jax.Array) -> jax.Array:
        if sampler is not None:
            arguments["sampling_log_probs"] = log_drawn[token]
        return kljax.estimate_kl(log_p[token], log_ref[token], **arguments)

    return oracles.expectation(jnp.exp(log_drawn), estimate)


def reverse(logits: jax.Array, ref: jax.Array) -> jax.Array:
    return oracles.exact_kl(logits, ref)


def forward(logits: jax.Array, ref: jax.Array) -> jax.Array:
    return oracles.exact_kl(ref, logits)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_value_is_the_kl(estimator: str, logits: tuple[jax.Array, ...]) -> None:
    policy, ref, _ = logits
    chex.assert_trees_all_close(expected(policy, ref, estimator=estimator), reverse(policy, ref), **CLOSE)


def test_values_other_than_the_kl(logits: tuple[jax.Array, ...]) -> None:
    policy, ref, _ = logits
    x = jax.nn.log_softmax(policy) - jax.nn.log_softmax(ref)
    chex.assert_trees_all_close(
        (expected(policy, ref, estimator="k2"), expected(policy, ref, estimator="abs")),
        ((jax.nn.softmax(policy) * x**2 / 2).sum(), (jax.nn.softmax(policy) * jnp.abs(x)).sum()),
        **CLOSE,
    )


def test_k1_has_no_expected_gradient(logits: tuple[jax.Array, ...]) -> None:
    policy, ref, _ = logits
    chex.assert_trees_all_close(
        jax.grad(lambda z: expected(z, ref, estimator="k1"))(policy), jnp.zeros(VOCABULARY), **CLOSE
    )


def test_k2_has_the_gradient_of_the_reverse_kl(logits: tuple[jax.Array, ...]) -> None:
    policy, ref, _ = logits
    actual = jax.grad(lambda z: expected(z, ref, estimator="k2"))(policy)
    chex.assert_trees_all_close(actual, jax.grad(reverse)(policy, ref), **CLOSE)


def test_k3_has_the_gradient_of_the_forward_kl(logits: tuple[jax.Array, ...]) -> None:
    policy, ref, _ = logits
    actual = jax.grad(lambda z: expected(z, ref, estimator="k3"))(policy)
    chex.assert_trees_all_close(actual, jax.grad(forward)(policy, ref), **CLOSE)
    assert jnp.abs(actual - jax.grad(reverse)(policy, ref)).max() > 0.05, "the two directions must differ in this test"


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "low_var_kl"])
def test_straight_through_has_the_reverse_kl_gradient(estimator: str, logits: tuple[jax.Array, ...]) -> None:
    policy, ref, _ = logits
    value, grad = jax.value_and_grad(lambda z: expected(z, ref, estimator=estimator, gradient="k2"))(policy)
    chex.assert_trees_all_close(grad, jax.grad(reverse)(policy, ref), **CLOSE)
    chex.assert_trees_all_close(value, expected(policy, ref, estimator=estimator), **CLOSE)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_corrected_estimators_are_right_off_policy(estimator: str, logits: tuple[jax.Array, ...]) -> None:
    policy, ref, sampler = logits
    value, grad = jax.value_and_grad(lambda z: expected(z, ref, sampler, estimator=estimator))(policy)
    chex.assert_trees_all_close((value, grad), (reverse(policy, ref), jax.grad(reverse)(policy, ref)), **CLOSE)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_straight_through_is_corrected_off_policy(estimator: str, logits: tuple[jax.Array, ...]) -> None:
    policy, ref, sampler = logits
    grad = jax.grad(lambda z: expected(z, ref, sampler, estimator=estimator, gradient="k2"))(policy)
    chex.assert_trees_all_close(grad, jax.grad(reverse)(policy, ref), **CLOSE)


def test_without_the_correction_off_policy_gradients_are_wrong(logits: tuple[jax.Array, ...]) -> None:
    policy, ref, sampler = logits
    log_p, log_ref = jax.nn.log_softmax(policy), jax.nn.log_softmax(ref)
    drawn = jax.nn.softmax(sampler)
    grad = jax.grad(lambda z: (drawn * kljax.k2(jax.nn.log_softmax(z), log_ref)).sum())(policy)
    assert other_seeds.shown(jnp.abs(grad - jax.grad(reverse)(policy, ref)).max() > 0.1)
    assert other_seeds.shown(jnp.abs(jnp.exp(log_p) - drawn).max() > 0.1)


def test_rollout_kl_loss_pulls_towards_the_rollout(logits: tuple[jax.Array, ...]) -> None:
    # The tokens come from the rollout: k3 and k2 of log pi - log rollout are compared with the exact sums over it.
    policy, _, rollout = logits
    drawn, log_rollout = jax.nn.softmax(rollout), jax.nn.log_softmax(rollout)

    def loss(z: jax.Array, estimator: str) -> jax.Array:
        mask = jnp.ones(VOCABULARY, bool)
        return (drawn * kljax.rollout_kl_loss(jax.nn.log_softmax(z), log_rollout, mask, estimator=estimator)).sum()

    # E_rollout[k1] = -KL(rollout || pi): its gradient pushes away from the rollout, as the docstring says.
    grad = jax.grad(loss)(policy, "k1")
    chex.assert_trees_all_close(grad, -jax.grad(lambda z: oracles.exact_kl(rollout, z))(policy), **CLOSE)
    # Near the rollout k2 and k3 have the same gradient to first order, that of KL(rollout || pi).
    near = rollout + 1e-7 * policy
    for estimator in ("k2", "k3"):
        chex.assert_trees_all_close(
            jax.grad(loss)(near, estimator),
            jax.grad(lambda z: oracles.exact_kl(rollout, z))(near),
            rtol=1e-5,
            atol=1e-13,
        )


@pytest.mark.parametrize(
    ("loss", "arguments"),
    [
        (kljax.ppo_clip_loss, {}),
        (kljax.cispo_loss, {}),
        (kljax.gspo_loss, {}),
    ],
    ids=["ppo", "cispo", "gspo"],
)
def test_policy_losses_are_the_policy_gradient_on_policy(
    loss: object, arguments: dict[str, float], logits: tuple[jax.Array, ...]
) -> None:
    # One token per row: -E[A] differentiated through the probabilities is the exact policy gradient.
    policy, advantages, _ = logits
    old, mask = jax.nn.log_softmax(policy)[:, None], jnp.ones((VOCABULARY, 1), bool)

    def surrogate(z: jax.Array) -> jax.Array:
        per_token = loss(jax.nn.log_softmax(z)[:, None], old, advantages[:, None], mask, **arguments)
        return (jax.nn.softmax(policy)[:, None] * per_token).sum()

    exact = jax.grad(lambda z: -(jax.nn.softmax(z) * advantages).sum())(policy)
    chex.assert_trees_all_close(jax.grad(surrogate)(policy), exact, **CLOSE)
