"""One batch for the tests of the policy losses, and the checks that all of them pass."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tests.kljax.calls import traced_program
from tests.masks import MASK, check_masked, draw

LP, OLD, ADV = draw(0.7, 0.7, 2.0)
LP, OLD = LP - 2.0, OLD - 2.0
D = LP - OLD
R = np.exp(D)
N = np.maximum(MASK.sum(-1, keepdims=True), 1)
WEIGHTS = 1.0 + np.arange(MASK.size).reshape(MASK.shape) % 5

Loss = Callable[..., jax.Array]


def check_pointwise(
    loss: Loss, value: np.ndarray, slope: np.ndarray, *, data: tuple[np.ndarray, ...] = (OLD, ADV), masks: bool = True
) -> None:
    """The loss `loss(log_probs, *data)` of each token, and its derivative to the log-prob of the same token."""

    @traced_program
    def value_and_pulled(log_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, pull = jax.vjp(lambda lp: loss(lp, *data), log_probs)
        return losses, pull(jnp.asarray(WEIGHTS))[0]

    losses, gradient = value_and_pulled(LP)
    np.testing.assert_allclose(losses, np.where(MASK, value, 0), 1e-12, 1e-14)
    np.testing.assert_allclose(gradient, np.where(MASK, WEIGHTS * slope, 0), 1e-12, 1e-14)
    if masks:
        check_masked(loss, [LP, *data])


def far(dtype: type = np.float64) -> list[jax.Array]:
    """Log-ratios of -200, 200 and 0 at advantages of -1, 0 and 1, and the mask: `[9]` each."""
    apart, advantages = (x.ravel() for x in np.meshgrid([-200.0, 0.0, 200.0], [-1.0, 0.0, 1.0]))
    log_probs, old = np.minimum(apart, 0) - 1, np.minimum(-apart, 0) - 1
    return [jnp.asarray(x, dtype) for x in (log_probs, old, advantages)]


def check_far(loss: Loss, dtype: type = np.float64) -> tuple[jax.Array, jax.Array]:
    """Value and gradient with probabilities at the ends of the range are finite."""
    log_probs, old, advantages = far(dtype)

    @traced_program
    def value_and_slope(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, pull = jax.vjp(lambda lp: loss(lp, *arrays[1:]), arrays[0])
        return value, pull(jnp.ones_like(value))[0]

    value, slope = value_and_slope(log_probs, old, advantages)
    assert np.isfinite(value).all()
    assert np.isfinite(slope).all()
    return value, slope
