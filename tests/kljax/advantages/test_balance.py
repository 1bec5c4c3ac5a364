import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, draw

ADV, NOISE = draw(1.0, 1.0)
WEIGHTS = np.exp(NOISE)


@pytest.mark.parametrize("balance", [-1.0, -0.3, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_smaller_sign_and_mean_size_follow_art(balance: float, weighted: bool) -> None:
    """ART's packing, written out: weights of mean 1, the sign, the division by the mean."""
    weights = WEIGHTS if weighted else np.ones_like(WEIGHTS)
    weights = weights / weights[MASK].mean()
    scaled = ADV.copy()
    if balance > 0:
        scaled[ADV <= 0] *= 1 - balance
    elif balance < 0:
        scaled[ADV >= 0] *= 1 + balance
    scaled /= (np.abs(scaled) * weights)[MASK].mean()
    options = {"weights": WEIGHTS} if weighted else {}
    actual = kljax.balanced_advantages(np.where(MASK, ADV, np.nan), MASK, balance=balance, **options)
    np.testing.assert_allclose(actual, np.where(MASK, scaled, 0), 1e-12)


def test_batch_without_advantages_stays_zero() -> None:
    np.testing.assert_array_equal(kljax.balanced_advantages(-jnp.ones((1, 2)), jnp.ones((1, 2), bool), balance=1.0), 0)


@pytest.mark.parametrize("balance", [-1.1, 1.1])
def test_balance_out_of_range_is_refused(balance: float) -> None:
    with pytest.raises(ValueError, match="balance: got"):
        kljax.balanced_advantages(ADV, MASK, balance=balance)
