import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, draw

ENTROPIES = np.abs(draw(1.0)[0])


def by_quantile(entropies: np.ndarray, mask: np.ndarray, fraction: float) -> np.ndarray:
    """The tokens at or above the interpolated quantile of the unmasked ones, in float64."""
    selected = np.ma.masked_array(entropies, mask=~mask).compressed()
    return mask & (entropies >= np.quantile(selected, 1 - fraction, method="linear")) if selected.size else mask


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.73, 1.0])
def test_tokens_at_or_above_the_quantile_are_selected(fraction: float) -> None:
    poisoned = np.where(MASK, ENTROPIES, np.nan)
    got = kljax.high_entropy_mask(poisoned, MASK, fraction=fraction)
    assert got.dtype == bool
    np.testing.assert_array_equal(got, by_quantile(ENTROPIES, MASK, fraction))
    assert int(got.sum()) == 1 + int(fraction * (MASK.sum() - 1))
    jitted = jax.jit(kljax.high_entropy_mask)(poisoned, MASK, fraction=fraction)
    np.testing.assert_array_equal(jitted, got)


@pytest.mark.parametrize("seed", range(5))
def test_equal_entropies_are_selected_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    entropies, mask = rng.integers(0, 3, (4, 9)).astype(float), rng.random((4, 9)) < 0.7
    for fraction in (0.1, 0.3, 0.6):
        got = kljax.high_entropy_mask(entropies, mask, fraction=fraction)
        np.testing.assert_array_equal(got, by_quantile(entropies, mask, fraction))
    equal = kljax.high_entropy_mask(np.ones(MASK.shape), MASK, fraction=0.1)
    np.testing.assert_array_equal(equal, MASK)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_empty_selection_gives_an_empty_mask(shape: tuple[int, int]) -> None:
    got = kljax.high_entropy_mask(jnp.full(shape, jnp.inf), jnp.zeros(shape, bool))
    np.testing.assert_array_equal(got, np.zeros(shape, bool))


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"fraction: got 1\.5, expected a number <= 1"):
        kljax.high_entropy_mask(ENTROPIES, MASK, fraction=1.5)
    with pytest.raises(ValueError, match="fraction: got -1"):
        kljax.high_entropy_mask(ENTROPIES, MASK, fraction=-1)
    with pytest.raises(ValueError, match="shapes differ: entropies"):
        kljax.high_entropy_mask(ENTROPIES[1:], MASK)
