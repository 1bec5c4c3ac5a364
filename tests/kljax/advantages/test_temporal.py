import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, check_masked, draw

REWARDS, VALUES = draw(1.0, 1.0)


def returns_by_hand(masked_tokens: str, gamma: float) -> np.ndarray:
    result = np.zeros(MASK.shape)
    for row, mask in enumerate(MASK):
        later = 0.0
        for t in reversed(range(len(mask))):
            total = np.where(mask, REWARDS[row], 0)[t] + gamma * later
            if mask[t]:
                result[row, t] = later = total
            else:
                later = {"skip": later, "reset": 0.0, "zero": total}[masked_tokens]
    return result


def gae_by_hand(gamma: float, lam: float) -> np.ndarray:
    """The sum over later unmasked tokens, without a recursion."""
    result = np.zeros(MASK.shape)
    for row, mask in enumerate(MASK):
        at = np.flatnonzero(mask)
        values = np.append(VALUES[row, at], 0)
        delta = REWARDS[row, at] + gamma * values[1:] - values[:-1]
        for i, t in enumerate(at):
            result[row, t] = sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(at)))
    return result


def gae_over_all_positions(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """The sum over all later positions, masked or not."""
    length = rewards.shape[-1]
    delta = rewards + gamma * np.append(values[:, 1:], np.zeros((len(values), 1)), 1) - values
    weight = np.tril((gamma * lam) ** np.abs(np.subtract.outer(np.arange(length), np.arange(length))))
    return np.where(MASK, delta @ weight, 0)


@pytest.mark.parametrize("masked_tokens", ["skip", "reset", "zero"])
def test_returns(masked_tokens: str) -> None:
    def returns(rewards: jax.Array) -> jax.Array:
        return kljax.reinforce_plus_plus_returns(rewards, MASK, gamma=0.9, masked_tokens=masked_tokens)

    np.testing.assert_allclose(returns(REWARDS), returns_by_hand(masked_tokens, 0.9), 1e-12, 1e-14)
    check_masked(returns, [REWARDS])


def test_the_recorded_returns_of_the_three_rules() -> None:
    rewards, mask = np.array([[0.0, 0.7, 0.0, 1.0]]), np.array([[1, 0, 1, 1]])
    expected = {"skip": [0.81, 0, 0.9, 1], "reset": [0, 0, 0.9, 1], "zero": [0.729, 0, 0.9, 1]}
    for rule, row in expected.items():
        got = kljax.reinforce_plus_plus_returns(rewards, mask, gamma=0.9, masked_tokens=rule)
        np.testing.assert_allclose(got, [row], 1e-14)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.9, 0.0)])
def test_gae(gamma: float, lam: float) -> None:
    advantages, returns = kljax.gae(REWARDS, VALUES, MASK, gamma=gamma, lam=lam)
    expected = gae_by_hand(gamma, lam)
    np.testing.assert_allclose(advantages, expected, 1e-12, 1e-14)
    np.testing.assert_allclose(returns, np.where(MASK, expected + VALUES, 0), 1e-12, 1e-14)


@pytest.mark.parametrize("masked_tokens", ["zero", "none"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.9, 0.0), (0.0, 0.8)])
def test_gae_running_through_the_mask(masked_tokens: str, gamma: float, lam: float) -> None:
    options = {"gamma": gamma, "lam": lam, "masked_tokens": masked_tokens}
    seen = (np.where(MASK, x, 0) if masked_tokens == "zero" else x for x in (REWARDS, VALUES))
    expected = gae_over_all_positions(*seen, gamma, lam)
    advantages, returns = kljax.gae(REWARDS, VALUES, MASK, **options)
    np.testing.assert_allclose(advantages, expected, 1e-12, 1e-14)
    np.testing.assert_allclose(returns, np.where(MASK, expected + VALUES, 0), 1e-12, 1e-14)
    if masked_tokens == "zero":
        check_masked(lambda rewards, values: kljax.gae(rewards, values, MASK, **options), [REWARDS, VALUES])


TURNS = np.array([[0, 1, 1, 0, 0, 1, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 1, 1, 0, 1, 1, 1]], bool)


def gae_per_turn(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """The sum over later unmasked tokens, with as many factors as turns have ended in between."""
    result = np.zeros(TURNS.shape)
    for row, mask in enumerate(TURNS):
        at = np.flatnonzero(mask)
        ends = np.diff(at, append=len(mask) + 1) > 1
        after = np.append(values[row, at], 0)
        delta = rewards[row, at] + np.where(ends, gamma, 1) * after[1:] - after[:-1]
        for i, t in enumerate(at):
            result[row, t] = sum((gamma * lam) ** ends[i:j].sum() * delta[j] for j in range(i, len(at)))
    return result


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.9, 0.0), (0.0, 0.8)])
def test_discounts_per_turn(gamma: float, lam: float) -> None:
    rewards, values = np.random.default_rng(4).normal(size=(2, *TURNS.shape))
    options = {"gamma": gamma, "discount_per": "turn"}
    expected = gae_per_turn(rewards, values, gamma, lam)
    for mask in (TURNS, kljax.Segments(TURNS, np.zeros(TURNS.shape, np.int32))):
        advantages, returns = kljax.gae(rewards, values, mask, lam=lam, **options)
        np.testing.assert_allclose(advantages, expected, 1e-12, 1e-14)
        np.testing.assert_allclose(returns, np.where(TURNS, expected + values, 0), 1e-12, 1e-14)
        discounted = kljax.reinforce_plus_plus_returns(rewards, mask, **options)
        np.testing.assert_allclose(discounted, gae_per_turn(rewards, 0 * values, gamma, 1.0), 1e-12, 1e-14)


def test_packed_rows_discount_per_turn_as_rows_of_their_own() -> None:
    rewards, values = np.random.default_rng(5).normal(size=(2, *TURNS.shape))
    ids = np.repeat(np.arange(3), TURNS.shape[1])[None]
    packed = kljax.Segments(TURNS.reshape(1, -1), ids)
    options = {"gamma": 0.9, "lam": 0.8, "discount_per": "turn"}
    got, _ = kljax.gae(rewards.reshape(1, -1), values.reshape(1, -1), packed, **options)
    np.testing.assert_allclose(got.reshape(TURNS.shape), gae_per_turn(rewards, values, 0.9, 0.8), 1e-12, 1e-14)


def test_rules_of_masked_tokens_hold_per_turn() -> None:
    rewards, mask = np.array([[0.0, 1.0, 0.0, 1.0]]), np.array([[1, 1, 0, 1]])
    expected = {"skip": [1.5, 1.5, 0, 1], "reset": [1, 1, 0, 1], "zero": [1.5, 1.5, 0, 1]}
    for rule, row in expected.items():
        got = kljax.reinforce_plus_plus_returns(rewards, mask, gamma=0.5, masked_tokens=rule, discount_per="turn")
        np.testing.assert_allclose(got, [row], 1e-14)


def test_three_rules_agree_without_inner_or_trailing_mask() -> None:
    mask = np.array([[0, 1, 1, 1], [1, 1, 1, 1]])
    rewards, values = REWARDS[:2, :4], VALUES[:2, :4]
    skip, carry, none = (
        kljax.gae(rewards, values, mask, gamma=0.9, lam=0.8, masked_tokens=rule) for rule in ("skip", "zero", "none")
    )
    jax.tree.map(np.testing.assert_array_equal, (carry, none), (skip, skip))


def test_values_under_the_mask_stay_out_of_reach() -> None:
    mask = np.array([[0, 0, 1, 0, 1, 0]])
    values, rewards = np.full(mask.shape, np.nan), np.full(mask.shape, np.nan)
    values[mask == 1], rewards[mask == 1] = [0.5, 0.25], [1.0, 2.0]

    def total(gamma: float, lam: float, *arrays: jax.Array) -> jax.Array:
        advantages, returns = kljax.gae(*arrays, mask, gamma=gamma, lam=lam, masked_tokens="none")
        return (advantages + 2 * returns).sum()

    value_and_grads = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))
    # Without a discount each token is on its own.
    value, (to_gamma, _, *grads) = value_and_grads(0.0, 1.0, rewards, values)
    np.testing.assert_allclose(value, 3 * 3.0 - 0.75)
    assert all(np.isfinite(grad).all() for grad in (to_gamma, *grads))
    # Without a trace the value of the next position counts, and nothing behind it.
    values[0, [3, 5]] = 4.0
    np.testing.assert_allclose(value_and_grads(1.0, 0.0, rewards, values)[0], 3 * (3.0 + 8.0) - 0.75)
    # Before the first unmasked token nothing is asked for.
    rewards[0, [3, 5]] = 1.0
    value, grads = value_and_grads(0.9, 0.8, rewards, values)
    assert np.isfinite(value)
    assert all(np.isfinite(grad).all() for grad in grads)


def test_recorded_returns_of_verl_and_unmasked_systems() -> None:
    values, rewards, mask = np.array([0.5, 0.1, 0.3, 0.2]), np.array([0.0, 0.7, 0.0, 1.0]), np.array([1, 0, 1, 1])
    for rule, expected in (("skip", [0.59832, 0, 0.756, 1.0]), ("none", [0.95279, 0, 0.756, 1.0])):
        _, returns = kljax.gae(rewards, values, mask, gamma=0.9, lam=0.8, masked_tokens=rule)
        np.testing.assert_allclose(returns, expected, 1e-5)


def test_gae_at_lambda_one_is_return_minus_value() -> None:
    advantages, returns = kljax.gae(REWARDS, VALUES, MASK, gamma=0.9, lam=1.0)
    discounted = kljax.reinforce_plus_plus_returns(REWARDS, MASK, gamma=0.9)
    np.testing.assert_allclose(returns, discounted, 1e-12, 1e-14)
    np.testing.assert_allclose(advantages, kljax.masked(discounted - VALUES, MASK), 1e-12, 1e-14)


def test_gamma_of_zero_lets_no_infinity_through() -> None:
    returns = kljax.reinforce_plus_plus_returns(np.array([[1, np.inf]]), np.ones((1, 2), bool), gamma=0.0)
    np.testing.assert_array_equal(returns, [[1, np.inf]])


def test_more_leading_axes_and_traced_discounts() -> None:
    stacked = [np.stack([x, x[::-1]]) for x in (REWARDS, VALUES, MASK)]
    got, _ = jax.jit(lambda gamma, lam: kljax.gae(*stacked, gamma=gamma, lam=lam))(jnp.float32(0.5), jnp.float32(0.5))
    expected = gae_by_hand(0.5, 0.5)
    np.testing.assert_allclose(got, np.stack([expected, expected[::-1]]), 1e-12, 1e-14)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"masked_tokens: got 'zeros'.*did you mean 'zero'"):
        kljax.reinforce_plus_plus_returns(REWARDS, MASK, masked_tokens="zeros")
    with pytest.raises(ValueError, match=r"masked_tokens: got 'reset', expected one of skip, zero, none"):
        kljax.gae(REWARDS, VALUES, MASK, masked_tokens="reset")
    with pytest.raises(ValueError, match="gamma: got -1"):
        kljax.reinforce_plus_plus_returns(REWARDS, MASK, gamma=-1)
    with pytest.raises(ValueError, match="lam: got -1"):
        kljax.gae(REWARDS, VALUES, MASK, lam=-1)
    for discount in (np.full((1, 7), 0.9), np.full(7, 0.9), np.ones(1)):
        expected = rf"gamma: got shape \[{', '.join(map(str, discount.shape))}\], expected a scalar"
        with pytest.raises(ValueError, match=expected):
            kljax.reinforce_plus_plus_returns(REWARDS, MASK, gamma=discount)
        with pytest.raises(ValueError, match=expected):
            kljax.gae(REWARDS, VALUES, MASK, gamma=discount)
        with pytest.raises(ValueError, match="lam: got shape"):
            kljax.gae(REWARDS, VALUES, MASK, lam=discount)
    with pytest.raises(ValueError, match="shapes differ: rewards"):
        kljax.gae(REWARDS, VALUES[1:], MASK)
