import jax
import numpy as np
import pytest

import kljax

REWARDS = np.array([1.0, 0.0, 0.25, 0.25, 0.25, 5.0, np.nan, 2.0, 2.3])
IDS = np.array([0, 0, 1, 1, 1, 2, -1, 4, 4])
GROUPS = 5


def by_hand(threshold: float, ddof: int, real: np.ndarray) -> list[bool]:
    collected = []
    for group in range(GROUPS):
        rewards = REWARDS[real & (group == IDS)]
        collected.append(len(rewards) > 1 and bool(np.std(rewards, ddof=ddof) > threshold))
    return collected


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("threshold", [0.0, 0.2, 1.0])
def test_groups_above_the_standard_deviation_are_selected(threshold: float, ddof: int) -> None:
    options = {"num_groups": GROUPS, "threshold": threshold, "ddof": ddof}
    expected = by_hand(threshold, ddof, IDS >= 0)
    np.testing.assert_array_equal(kljax.groups_with_spread(REWARDS, IDS, **options), expected)
    jitted = jax.jit(lambda r: kljax.groups_with_spread(r, IDS, **options))(REWARDS)
    np.testing.assert_array_equal(jitted, expected)
    valid = np.arange(len(IDS)) != 1
    groups = kljax.Groups(IDS, GROUPS, valid)
    got = kljax.groups_with_spread(REWARDS, groups, threshold=threshold, ddof=ddof)
    np.testing.assert_array_equal(got, by_hand(threshold, ddof, valid & (IDS >= 0)))


def test_equal_rewards_rounded_in_float32_have_no_spread() -> None:
    thirds = np.full(7, np.float32(0.1))
    assert not kljax.groups_with_spread(thirds, np.zeros(7, int), num_groups=1).any()


def test_unselected_groups_are_left_out_as_invalid_rows() -> None:
    spread = kljax.groups_with_spread(REWARDS, IDS, num_groups=GROUPS)
    options = {"num_groups": GROUPS, "singleton": "reward"}
    got = kljax.rloo_advantages(REWARDS, kljax.Groups(IDS, GROUPS, spread[IDS]), singleton="reward")
    everything = kljax.rloo_advantages(REWARDS, IDS, **options)
    np.testing.assert_array_equal(got, np.where(np.isin(IDS, [0, 4]), everything, 0))


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="threshold: got -1"):
        kljax.groups_with_spread(REWARDS, IDS, num_groups=GROUPS, threshold=-1)
    with pytest.raises(ValueError, match="ddof: got 2"):
        kljax.groups_with_spread(REWARDS, IDS, num_groups=GROUPS, ddof=2)
    with pytest.raises(ValueError, match="group_ids: got 4, expected ids below num_groups = 2"):
        kljax.groups_with_spread(REWARDS, IDS, num_groups=2)
