import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.kljax.ratios.level_ratios import LP, OLD, D
from tests.masks import MASK


def test_log_ratios_and_token_ratios() -> None:
    np.testing.assert_allclose(kljax.log_ratios(LP, OLD, MASK), D, 1e-14)
    np.testing.assert_allclose(kljax.token_ratios(LP, OLD, MASK), np.where(MASK, np.exp(D), 0), 1e-14)


def test_sequence_ratios_are_products_and_geometric_their_roots() -> None:
    product = np.array([np.prod(np.exp(LP - OLD)[row][MASK[row]]) for row in range(len(MASK))])
    np.testing.assert_allclose(kljax.sequence_ratios(LP, OLD, MASK), product, 1e-13)
    root = product ** (1 / np.maximum(MASK.sum(-1), 1))
    np.testing.assert_allclose(kljax.geometric_ratios(LP, OLD, MASK), root, 1e-13)
    assert product[0] == 1  # a row without a token


def test_log_ratio_clip_has_the_gradient_of_pytorch() -> None:
    lp = jnp.array([0.5, 2.0, 3.0, -2.0, -3.0])
    grad = jax.grad(lambda x: kljax.log_ratios(x, jnp.zeros(5), jnp.ones(5, bool), log_ratio_clip=2.0).sum())(lp)
    np.testing.assert_array_equal(grad, [1, 1, 0, 1, 0])


def test_the_clip_of_a_sequence_bounds_the_sum() -> None:
    lp, old, mask = jnp.array([[3.0, -3.0], [3.0, 3.0]]), jnp.zeros((2, 2)), jnp.ones((2, 2), bool)
    clipped = kljax.sequence_ratios(lp, old, mask, log_ratio_clip=2.0)
    np.testing.assert_allclose(clipped, np.exp([0.0, 2.0]), 1e-15)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"old_log_probs \[6, 6\]"):
        kljax.log_ratios(LP, OLD[:, 1:], MASK)
    with pytest.raises(ValueError, match="log_ratio_clip: got -1"):
        kljax.token_ratios(LP, OLD, MASK, log_ratio_clip=-1)
    with pytest.raises(TypeError, match="mask: got dtype float64"):
        kljax.log_ratios(LP, OLD, MASK.astype(float))
