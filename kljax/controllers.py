"""KL coefficients over time, as pairs of pure functions over a small state that goes into the checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kljax._checks import check_at_least
from kljax._typing import Array, ArrayLike

__all__ = ["Controller", "ControllerState", "adaptive_kl", "fixed_kl"]

# The bound on the relative error of Ziegler et al.; every system that adapts the coefficient uses it.
_MAX_ERROR = 0.2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ControllerState:
    """The state of a KL controller.

    Attributes:
      coef: the current coefficient, a scalar array, never negative; float32, or float64 under x64.
    """

    coef: Array


class Controller(NamedTuple):
    """Two pure functions: `state = init()` and `state = update(state, kl, num_samples)`; both can be jitted.

    Attributes:
      init: makes the first state.
      update: takes the state, the mean KL measured (a scalar, in nats) and the number of samples it was measured on
        (rows), and returns the next state. Read `state.coef` before the update that follows its use.
    """

    init: Callable[[], ControllerState]
    update: Callable[[ControllerState, ArrayLike, ArrayLike], ControllerState]


def fixed_kl(coef: float) -> Controller:
    """A coefficient that stays what it is: `coef_{k+1} = coef_k`.

    Args:
      coef: the coefficient, at least 0.

    Returns:
      A `Controller` whose `update` returns the state it was given.

    Gradient:
      None; coefficients are data.

    Raises:
      ValueError: if `coef` is negative.

    Example:
      >>> import kljax
      >>> controller = kljax.fixed_kl(0.25)
      >>> state = controller.update(controller.init(), 3.0, 64)
      >>> print(state.coef)
      0.25
    """
    return Controller(_initial(coef), lambda state, kl, num_samples: state)


def adaptive_kl(coef: float, *, target: float, horizon: float) -> Controller:
    """A coefficient that steers the KL to a target: `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon`.

    Args:
      coef: the first coefficient, at least 0. From 0 it cannot grow.
      target: the KL to hold, in nats, positive; in the unit of what `update` is given (mean per token, say).
      horizon: the number of samples over which a relative error of 1 would double the coefficient, positive.

    Returns:
      A `Controller`; its coefficient never falls below 0. A KL of infinity counts as the largest error, and a KL that
      is NaN leaves the coefficient as it is: one bad batch must not end the run with a NaN coefficient in its state.

    Gradient:
      None; coefficients are data.

    Raises:
      ValueError: if `coef` is negative, or `target` or `horizon` is not positive.

    References:
      Ziegler et al., "Fine-tuning language models from human preferences" (2019), section 2.2.

    Example:
      >>> import kljax
      >>> controller = kljax.adaptive_kl(0.1, target=0.1, horizon=1000)
      >>> state = controller.update(controller.init(), 0.5, 100)
      >>> print(state.coef.round(4))
      0.102
    """
    check_at_least("target", target, 0, strict=True)
    check_at_least("horizon", horizon, 0, strict=True)

    def update(state: ControllerState, kl: ArrayLike, num_samples: ArrayLike) -> ControllerState:
        dtype = state.coef.dtype
        error = jnp.clip(jnp.asarray(kl, dtype) / target - 1, -_MAX_ERROR, _MAX_ERROR)
        factor = jnp.maximum(1 + error * jnp.asarray(num_samples, dtype) / horizon, 0)
        return ControllerState(jnp.where(jnp.isnan(factor), state.coef, state.coef * factor))

    return Controller(_initial(coef), update)


def _initial(coef: float) -> Callable[[], ControllerState]:
    check_at_least("coef", coef, 0)
    return lambda: ControllerState(jnp.asarray(coef, jnp.result_type(float)))
