import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.masks import MASK, check_masked, draw

LP, OLD = draw(0.7, 0.7)
D = np.where(MASK, LP - OLD, 0)


def level_ratio(level: str) -> np.ndarray:
    """Ratios of a level as `[B, T]`, in numpy, unmasked."""
    if level == "token":
        return np.exp(LP - OLD)
    total = D.sum(-1) if level == "sequence" else D.sum(-1) / np.maximum(MASK.sum(-1), 1)
    return np.broadcast_to(np.exp(total)[:, None], MASK.shape)


def test_log_ratios_and_token_ratios() -> None:
    np.testing.assert_allclose(kljax.log_ratios(LP, OLD, MASK), D, 1e-14)
    np.testing.assert_allclose(kljax.token_ratios(LP, OLD, MASK), np.where(MASK, np.exp(D), 0), 1e-14)


def test_sequence_ratios_are_products_and_geometric_ratios_their_roots() -> None:
    product = np.array([np.prod(np.exp(LP - OLD)[row][MASK[row]]) for row in range(len(MASK))])
    np.testing.assert_allclose(kljax.sequence_ratios(LP, OLD, MASK), product, 1e-13)
    root = product ** (1 / np.maximum(MASK.sum(-1), 1))
    np.testing.assert_allclose(kljax.geometric_ratios(LP, OLD, MASK), root, 1e-13)
    assert product[0] == 1  # a row without a token


@pytest.mark.parametrize(
    "function", [kljax.log_ratios, kljax.token_ratios, kljax.sequence_ratios, kljax.geometric_ratios]
)
def test_ratios_do_not_see_what_is_masked(function) -> None:
    check_masked(lambda lp, old: function(lp, old, MASK), [LP, OLD])
    check_masked(lambda lp, old: function(lp, old, MASK, log_ratio_clip=0.3), [LP, OLD])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_truncated_weights_do_not_see_what_is_masked(level: str) -> None:
    weights = kljax.truncated_importance_weights(LP, OLD, MASK, level=level, max_weight=1.1)
    np.testing.assert_allclose(weights, np.where(MASK, np.minimum(level_ratio(level), 1.1), 0), 1e-13)
    untruncated = kljax.truncated_importance_weights(LP, OLD, MASK, level=level, max_weight=None)
    np.testing.assert_allclose(untruncated, np.where(MASK, level_ratio(level), 0), 1e-13)
    check_masked(
        lambda lp, old: kljax.truncated_importance_weights(lp, old, MASK, level=level, max_weight=1.1), [LP, OLD]
    )


def test_clip_of_the_log_ratio_has_the_gradient_of_pytorch() -> None:
    lp = jnp.array([0.5, 2.0, 3.0, -2.0, -3.0])
    grad = jax.grad(lambda x: kljax.log_ratios(x, jnp.zeros(5), jnp.ones(5, bool), log_ratio_clip=2.0).sum())(lp)
    np.testing.assert_array_equal(grad, [1, 1, 0, 1, 0])


def test_the_clip_of_a_sequence_bounds_the_sum() -> None:
    lp, old, mask = jnp.array([[3.0, -3.0], [3.0, 3.0]]), jnp.zeros((2, 2)), jnp.ones((2, 2), bool)
    clipped = kljax.sequence_ratios(lp, old, mask, log_ratio_clip=2.0)
    np.testing.assert_allclose(clipped, np.exp([0.0, 2.0]), 1e-15)


def test_a_capped_weight_that_overflows_has_gradient_zero() -> None:
    def weight(lp: jax.Array) -> jax.Array:
        return kljax.truncated_importance_weights(lp, jnp.zeros(2), jnp.ones(2, bool), max_weight=2.0).sum()

    value, grad = jax.value_and_grad(weight)(jnp.array([2000.0, 0.0]))
    assert value == 3
    np.testing.assert_array_equal(grad, [0, 1])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("lower", "upper"), [(0.7, 1.3), (None, 1.0), (0.9, None)])
def test_rejection_mask(level: str, lower: float | None, upper: float | None) -> None:
    ratio = level_ratio(level)
    inside = (ratio >= (lower or 0)) & (ratio <= (upper or np.inf))
    lp, old = np.where(MASK, LP, np.nan), np.where(MASK, OLD, np.inf)
    got = jax.jit(lambda lp, old: kljax.rejection_mask(lp, old, MASK, level=level, lower=lower, upper=upper))(lp, old)
    assert got.dtype == bool
    np.testing.assert_array_equal(got, MASK & inside)


def test_rejection_bounds_are_inclusive_and_nan_is_rejected() -> None:
    lp, old = jnp.array([0.0, jnp.nan, -jnp.inf]), jnp.zeros(3)
    got = kljax.rejection_mask(lp, old, jnp.ones(3, bool), lower=1.0, upper=1.0)
    np.testing.assert_array_equal(got, [True, False, False])


def test_veto_drops_the_whole_row_of_one_bad_token() -> None:
    lp = np.where(MASK, 0.0, -50.0)  # what is masked vetoes nothing
    lp[3, 2] = -11.0
    lp[4, 0] = -9.0
    lp[5, 4] = np.nan
    got = kljax.veto_mask(lp, np.zeros_like(lp), MASK, min_ratio=np.exp(-10.0))
    expected = MASK.copy()
    expected[[3, 5]] = False
    np.testing.assert_array_equal(got, expected)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"level: got 'tokens'.*did you mean 'token'"):
        kljax.truncated_importance_weights(LP, OLD, MASK, level="tokens")
    with pytest.raises(ValueError, match="max_weight: got 0"):
        kljax.truncated_importance_weights(LP, OLD, MASK, max_weight=0)
    with pytest.raises(ValueError, match=r"old_log_probs \[6, 6\]"):
        kljax.log_ratios(LP, OLD[:, 1:], MASK)
    with pytest.raises(ValueError, match="log_ratio_clip: got -1"):
        kljax.token_ratios(LP, OLD, MASK, log_ratio_clip=-1)
    with pytest.raises(ValueError, match="lower, upper"):
        kljax.rejection_mask(LP, OLD, MASK)
    with pytest.raises(ValueError, match=r"lower: got 2\.0, expected at most upper = 1\.0"):
        kljax.rejection_mask(LP, OLD, MASK, lower=2.0, upper=1.0)
    with pytest.raises(ValueError, match="min_ratio: got -1"):
        kljax.veto_mask(LP, OLD, MASK, min_ratio=-1)
    with pytest.raises(TypeError, match="mask: got dtype float64"):
        kljax.log_ratios(LP, OLD, MASK.astype(float))
