import jax
import numpy as np
import pytest
from scipy.special import log_softmax

import kljax

RNG = np.random.default_rng(0)
# Two prompts and a row alone; padding rows; a row of a group without a token; holes and rows that begin late.
MASK = np.array(
    [
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 1, 1, 1],
        [1, 0, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 1, 1],
        [1, 1, 1, 1, 1, 1, 1],
    ],
    bool,
)
IDS = np.array([0, 0, 1, 0, 1, 1, 2, -1])
GROUPS, ROWS = 4, len(MASK)
VOCABULARY = log_softmax(RNG.normal(size=(*MASK.shape, 5)), -1)
LOG_PROBS, SQUARES = VOCABULARY[..., 2], np.exp(2 * VOCABULARY).sum(-1)
REWARDS, WEIGHTS = RNG.normal(size=MASK.shape), RNG.uniform(0.5, 1.5, MASK.shape)


def by_hand(mask: np.ndarray, *, align: str, zero_tail: bool, eps: float, singleton: str, weights=None) -> np.ndarray:
    """One token at a time, from the lists of the unmasked tokens of each row of its group."""
    weights = np.ones(mask.shape) if weights is None else weights
    tokens = [np.flatnonzero(row) for row in mask]
    norm = weights**2 * (1 - 2 * np.exp(LOG_PROBS) + SQUARES)
    result = np.zeros(mask.shape)
    for i in range(ROWS):
        group = [j for j in range(ROWS) if IDS[j] == IDS[i] >= 0 and len(tokens[j])]
        lengths = sorted(len(tokens[j]) for j in group)
        for n, t in enumerate(tokens[i] if IDS[i] >= 0 else []):
            peers = []
            for j in group:
                u = t if align == "position" else (list(tokens[j]) + [None] * len(mask[0]))[n]
                if u is not None and mask[j, u]:
                    later, before = tokens[j][tokens[j] >= u], tokens[j][tokens[j] <= u]
                    peers.append((norm[j, before].sum(), REWARDS[j, later].sum()))
            reward_to_go = REWARDS[i, tokens[i][n:]].sum()
            baseline = sum(w * g for w, g in peers) / (sum(w for w, _ in peers) + eps)
            position = n if align == "token" else t - tokens[i][0]
            if zero_tail and len(tokens[i]) == lengths[-1] > lengths[-2:][0] and position >= lengths[-2]:
                baseline = 0.0
            if len(group) == 1:
                baseline = reward_to_go if singleton == "zero" else 0.0
            result[i, t] = reward_to_go - baseline
    return result


def advantages(mask: np.ndarray = MASK, rewards: np.ndarray = REWARDS, **options) -> jax.Array:
    return kljax.otb_advantages(rewards, LOG_PROBS, SQUARES, mask, IDS, num_groups=GROUPS, **options)[0]


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("align", ["token", "position"])
def test_every_token_by_hand(align: str, zero_tail: bool) -> None:
    options = {"align": align, "zero_tail": zero_tail, "eps": 1e-3}
    expected = by_hand(MASK, singleton="reward", **options)
    np.testing.assert_allclose(advantages(singleton="reward", **options), expected, 1e-12, 1e-14)
    weighed = by_hand(MASK, singleton="zero", weights=WEIGHTS, **options)
    np.testing.assert_allclose(advantages(weights=WEIGHTS, **options), weighed, 1e-12, 1e-14)
    _, returns = kljax.otb_advantages(REWARDS, LOG_PROBS, SQUARES, MASK, IDS, num_groups=GROUPS)
    real = MASK & (IDS >= 0)[:, None]
    np.testing.assert_array_equal(returns, kljax.reinforce_plus_plus_returns(REWARDS, real))


def test_aligned_rows_without_holes_match_either_way() -> None:
    lengths = np.array([5, 3, 7, 3, 2, 0, 4, 6])
    mask = np.arange(MASK.shape[1]) < lengths[:, None]
    np.testing.assert_allclose(advantages(mask), advantages(mask, align="position"), 1e-12, 1e-14)


def test_the_baseline_has_the_least_variance() -> None:
    # Of all baselines b of a position, sum_i W_i (G_i - b)^2 is least at the one that is used.
    mask = np.ones(MASK.shape, bool)
    got = kljax.otb_advantages(REWARDS, LOG_PROBS, SQUARES, mask, np.zeros(ROWS, int), num_groups=1)
    baseline = np.asarray(got[1] - got[0])
    np.testing.assert_allclose(baseline - baseline[:1], 0, atol=1e-13)
    norm = np.cumsum(1 - 2 * np.exp(LOG_PROBS) + SQUARES, 1)
    for step in (-1e-4, 1e-4):
        here, there = ((norm * (got[1] - b) ** 2).sum(0) for b in (baseline, baseline + step))
        assert (here < there).all()


def test_norm_is_the_score_norm() -> None:
    score = jax.jacfwd(lambda z: jax.nn.log_softmax(z)[2])(VOCABULARY[0, 0])
    np.testing.assert_allclose((score**2).sum(), 1 - 2 * np.exp(LOG_PROBS[0, 0]) + SQUARES[0, 0], 1e-12)


def test_policy_with_certainty_has_no_baseline() -> None:
    mask, ids = np.ones((2, 2), bool), np.zeros(2, int)
    certain = np.zeros((2, 2)), np.ones((2, 2))
    rewards = np.array([[0.0, 1.0], [0.0, 3.0]])
    got, _ = jax.jit(lambda r: kljax.otb_advantages(r, *certain, mask, ids, num_groups=1))(rewards)
    np.testing.assert_array_equal(got, [[1, 1], [3, 3]])


@pytest.mark.parametrize("align", ["token", "position"])
def test_padding_rows_are_left_out(align: str) -> None:
    spoiled = np.where((IDS >= 0)[:, None], REWARDS, np.nan)
    np.testing.assert_array_equal(advantages(rewards=spoiled, align=align), advantages(align=align))
    groups = kljax.Groups(np.where(IDS < 0, 0, IDS), GROUPS, IDS >= 0)
    marked, _ = kljax.otb_advantages(spoiled, LOG_PROBS, SQUARES, MASK, groups, align=align)
    np.testing.assert_array_equal(marked, advantages(align=align))


def test_errors_name_the_argument() -> None:
    arrays = REWARDS, LOG_PROBS, SQUARES, MASK
    with pytest.raises(ValueError, match="align: got 'turn', expected one of token, position"):
        kljax.otb_advantages(*arrays, IDS, num_groups=GROUPS, align="turn")
    with pytest.raises(ValueError, match="singleton: got 'one'"):
        kljax.otb_advantages(*arrays, IDS, num_groups=GROUPS, singleton="one")
    with pytest.raises(ValueError, match="eps: got -1"):
        kljax.otb_advantages(*arrays, IDS, num_groups=GROUPS, eps=-1)
    with pytest.raises(ValueError, match=r"group_ids: got shape \[8, 7\], expected \[8\]"):
        kljax.otb_advantages(*arrays, MASK.astype(int), num_groups=GROUPS)
    with pytest.raises(ValueError, match="group_ids: got 2, expected ids below num_groups = 2"):
        kljax.otb_advantages(*arrays, IDS, num_groups=2)
    with pytest.raises(ValueError, match="shapes differ: token_rewards"):
        kljax.otb_advantages(REWARDS[1:], *arrays[1:], IDS, num_groups=GROUPS)
    got, _ = jax.jit(lambda ids: kljax.otb_advantages(*arrays, ids, num_groups=2))(IDS)
    np.testing.assert_array_equal(np.isnan(got), MASK & (IDS == 2)[:, None])
