"""Squared errors of KL-regularised RL: value, gradient, the optimum, and the divisors of groups."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, draw

LP, OLD, REF, NOISE = (x - 2.0 for x in draw(0.7, 0.7, 0.7, 1.0))
ROW = np.sin(np.arange(len(MASK)))
ADV = np.where(MASK, ROW[:, None], np.nan)
N, FULL = MASK.sum(-1), MASK.any(-1)
GROUPS = np.array([0, 1, 0, 1, 0, 1, 0, 1, 2])[: len(MASK)]
WEIGHTS = 1.0 + np.arange(MASK.size).reshape(MASK.shape) % 5
OF_ROW = np.where(MASK, WEIGHTS, 0).sum(-1, keepdims=True)


def total(values: np.ndarray) -> np.ndarray:
    return np.where(MASK, values, 0).sum(-1)


def less_group_mean(values: np.ndarray) -> np.ndarray:
    result = np.zeros_like(values)
    for row in np.flatnonzero(FULL):
        result[row] = values[row] - values[(GROUPS[row] == GROUPS) & FULL].mean()
    return result


def sizes() -> np.ndarray:
    return np.array([((group == GROUPS) & FULL).sum() for group in GROUPS])


def check(loss, expected: np.ndarray, slope: np.ndarray) -> None:
    """The loss of each row at each of its tokens, and the slope to the log-prob of a token for a weight of 1."""

    @jax.jit
    def value_and_pulled(lp: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, pull = jax.vjp(loss, lp)
        return value, pull(jnp.asarray(WEIGHTS))[0]

    value, grad = value_and_pulled(np.where(MASK, LP, np.nan))
    np.testing.assert_allclose(value, np.where(MASK, expected[:, None], 0), 1e-12, 1e-14)
    np.testing.assert_allclose(grad, np.where(MASK, OF_ROW * slope[:, None], 0), 1e-12, 1e-14)


def test_a2po_regresses_the_log_ratio_on_the_advantage() -> None:
    error = 0.3 * total(LP - REF) - np.where(FULL, ROW, 0)
    check(lambda lp: kljax.a2po_loss(lp, REF, ADV, MASK, coef=0.3), error**2, 2 * 0.3 * error)


def test_gvpo_is_half_the_variance_of_a_group() -> None:
    reward, size = 0.3 * total(LP - OLD), sizes()
    error = less_group_mean(reward) - np.where(FULL, ROW, 0)
    share = np.where(FULL & (size > 1), size / np.maximum(size - 1, 1), 0)
    check(
        lambda lp: kljax.gvpo_loss(lp, OLD, ADV, MASK, GROUPS, num_groups=3, coef=0.3),
        share * error**2 / 2,
        0.3 * share * error,
    )
    rewards = np.where(FULL, ROW, 0)
    centred = kljax.broadcast_to_tokens(less_group_mean(rewards), MASK)
    losses = kljax.gvpo_loss(LP, OLD, centred, MASK, GROUPS, num_groups=3, coef=0.3).max(-1)
    for group in (0, 1):
        rows = (group == GROUPS) & FULL
        np.testing.assert_allclose(losses[rows].mean(), np.var((reward - rewards)[rows], ddof=1) / 2, 1e-12)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("cap", [1.5, None])
def test_flowrl_balances_each_completion(learned: bool, cap: float | None) -> None:
    score = total(LP - REF) / np.maximum(N, 1) - 2.0 * np.where(FULL, ROW, 0)
    log_partition = np.cos(np.arange(len(MASK)))
    error = np.where(FULL, log_partition + score, 0) if learned else less_group_mean(score)
    ratio = np.exp(total(LP - OLD))
    weight = ratio if cap is None else np.minimum(ratio, cap)
    if cap is not None:
        assert (ratio[FULL] > cap).any()
        assert (ratio[FULL] < cap).any()
    options = {"log_partition": log_partition} if learned else {}
    check(
        lambda lp: kljax.flowrl_loss(
            lp, OLD, REF, ADV, MASK, group_ids=GROUPS, num_groups=3, reward_scale=2.0, max_weight=cap, **options
        ),
        weight * error**2,
        2 * weight * error / np.maximum(N, 1),
    )


def sequences() -> np.ndarray:
    """All completions of two tokens over a vocabulary of three."""
    return np.array(list(itertools.product(range(3), repeat=2)))


@pytest.mark.parametrize("name", ["a2po", "gvpo"])
def test_optimum_is_the_policy_of_regularised_rl(name: str) -> None:
    """At `pi = ref exp(r / coef) / Z` every row has no loss, whatever the sampler, and no gradient."""
    rng, tokens = np.random.default_rng(0), sequences()
    ref_sequence, rewards = rng.dirichlet(np.ones(9)), rng.normal(size=9)
    tilted = ref_sequence * np.exp(rewards / 0.5)
    value = 0.5 * np.log(tilted.sum())
    policy = tilted / tilted.sum()

    def token_log_probs(joint: np.ndarray) -> np.ndarray:
        table = joint.reshape(3, 3)
        first = table.sum(-1)
        return np.log(np.stack([first[tokens[:, 0]], joint / first[tokens[:, 0]]], -1))

    lp, ref, mask = token_log_probs(policy), token_log_probs(ref_sequence), np.ones((9, 2), bool)
    if name == "a2po":
        advantages = kljax.broadcast_to_tokens(rewards - value, mask)
        loss = lambda lp: kljax.a2po_loss(lp, ref, advantages, mask, coef=0.5)  # noqa: E731
    else:
        advantages = kljax.broadcast_to_tokens(rewards - rewards.mean(), mask)
        loss = lambda lp: kljax.gvpo_loss(  # noqa: E731
            lp, ref, advantages, mask, np.zeros(9, int), num_groups=1, coef=0.5
        )
    value, slope = jax.value_and_grad(lambda lp: loss(lp).sum())(lp)
    np.testing.assert_allclose(value, 0, atol=1e-28)
    np.testing.assert_allclose(slope, 0, atol=1e-14)
    assert loss(ref).sum() > 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kljax.a2po_loss(LP, REF, ADV, MASK, coef=0.0), "coef: got 0.0, expected a number > 0"),
        (lambda: kljax.gvpo_loss(LP, REF, ADV, MASK, GROUPS), "num_groups: got None"),
        (lambda: kljax.gvpo_loss(LP, REF, ADV, MASK, GROUPS[:2], num_groups=3), "shapes differ: group_ids"),
        (
            lambda: kljax.flowrl_loss(
                LP, OLD, REF, ADV, MASK, group_ids=GROUPS, num_groups=3, log_partition=np.zeros(2)
            ),
            "shapes differ: log_partition",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
