import functools

import jax
import numpy as np
import pytest

import kljax
from tests.masks import MASK, check_masked, draw

LP, ROLLOUT = draw(0.7, 0.7)
VERSIONS = np.arange(MASK.size).reshape(MASK.shape) % 7


def test_share_of_the_policy_follows_the_age() -> None:
    age = 5 - VERSIONS
    share = np.where(age > 0, (age - 1) / np.where(age > 0, age, 1), 0)
    expected = np.where(MASK, (1 - share) * ROLLOUT + share * LP, 0)
    actual = kljax.loglinear_log_probs(LP, ROLLOUT, VERSIONS, MASK, version=5)
    np.testing.assert_allclose(actual, expected, 1e-13)
    check_masked(lambda lp, rollout: kljax.loglinear_log_probs(lp, rollout, VERSIONS, MASK, version=5), [LP, ROLLOUT])
    slopes = jax.grad(lambda *x: kljax.loglinear_log_probs(*x, VERSIONS, MASK, version=5).sum(), (0, 1))(LP, ROLLOUT)
    np.testing.assert_array_equal(slopes, 0)


def test_narrow_versions_have_the_age_of_wide_ones() -> None:
    of = functools.partial(kljax.loglinear_log_probs, LP, ROLLOUT, mask=MASK, version=1000)
    np.testing.assert_array_equal(of(VERSIONS.astype(np.int8)), of(VERSIONS))


@pytest.mark.parametrize(("version", "expected"), [(3, "rollout"), (2, "rollout"), (10**7, "policy")])
def test_ends_are_the_sampler_and_the_policy(version: int, expected: str) -> None:
    versions = np.full(MASK.shape, 2)
    actual = kljax.loglinear_log_probs(LP, ROLLOUT, versions, MASK, version=version)
    np.testing.assert_allclose(actual, np.where(MASK, LP if expected == "policy" else ROLLOUT, 0), 1e-5, 1e-6)
