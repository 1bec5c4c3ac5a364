import numpy as np
import pytest

import kljax

ROWS, TURNS, LENGTH = 6, 4, 12
RNG = np.random.default_rng(0)
SCORES, REWARDS = RNG.normal(size=(ROWS, TURNS)), RNG.normal(size=ROWS)
SCORED = RNG.random((ROWS, TURNS)) < 0.7
SCORED[0], SCORED[1] = False, True
IDS = np.sort(RNG.integers(0, TURNS, (ROWS, LENGTH)), -1)
MASK = RNG.random((ROWS, LENGTH)) < 0.7
MASK[2] = False
GROUPS = np.array([0, 1, 0, 1, 1, -1])


def credits(scores: np.ndarray, scored: np.ndarray, gamma: float) -> tuple[np.ndarray, float]:
    """The turns one after the other: progress, then each shared among the turns up to it."""
    progress, last = np.zeros(TURNS), None
    for turn in np.flatnonzero(scored):
        progress[turn] = 0 if last is None else scores[turn] - last
        last = scores[turn]
    shared = np.zeros(TURNS)
    for turn, gain in enumerate(progress):
        weights = np.array([gamma ** (turn - earlier) for earlier in range(turn + 1)])
        shared[: turn + 1] += gain * weights / weights.sum()
    return shared, progress.sum()


@pytest.mark.parametrize("gamma", [0.0, 0.6, 1.0])
def test_turns_move_credit_and_leave_the_mean(gamma: float) -> None:
    expected, returns = np.zeros((ROWS, LENGTH)), np.zeros(ROWS)
    shared = []
    for row in range(ROWS):
        of_turns, net = credits(SCORES[row], SCORED[row], gamma)
        shared.append(of_turns[IDS[row]])
        returns[row] = REWARDS[row] + net
    for row in np.flatnonzero(GROUPS >= 0):
        level = returns[row] - returns[(GROUPS[row] == GROUPS) & MASK.any(-1)].mean()
        centre = shared[row][MASK[row]].mean() if MASK[row].any() else 0
        expected[row] = np.where(MASK[row], level + 0.5 * (shared[row] - centre), 0)
    scores, ids = np.where(SCORED, SCORES, np.nan), np.where(MASK, IDS, 99)
    options = {"group_ids": GROUPS, "num_groups": 2, "coef": 0.5, "gamma": gamma}
    actual = kljax.turn_credit_advantages(REWARDS, scores, SCORED, ids, MASK, **options)
    np.testing.assert_allclose(actual, expected, 1e-12, 1e-14)
    plain = kljax.turn_credit_advantages(REWARDS, scores, SCORED, ids, MASK, **{**options, "coef": 0.0})
    np.testing.assert_allclose(actual.sum(-1), plain.sum(-1), 1e-12, 1e-13)
    unsigned = kljax.turn_credit_advantages(REWARDS, scores, SCORED, ids.astype(np.uint32), MASK, **options)
    np.testing.assert_array_equal(unsigned, actual)


def test_rows_without_scores_have_the_advantages_of_grpo() -> None:
    nothing = np.zeros_like(SCORED)
    actual = kljax.turn_credit_advantages(REWARDS, SCORES, nothing, IDS, MASK, group_ids=GROUPS, num_groups=2)
    plain = kljax.grpo_advantages(REWARDS, np.where(MASK.any(-1), GROUPS, -1), num_groups=2, scale="none")
    np.testing.assert_allclose(actual, kljax.broadcast_to_tokens(plain, MASK), 1e-12, 1e-15)


def test_group_ids_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards \[6\], group_ids \[1\]"):
        kljax.turn_credit_advantages(REWARDS, SCORES, SCORED, IDS, MASK, group_ids=np.array([0]), num_groups=1)
