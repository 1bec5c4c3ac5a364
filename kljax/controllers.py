"""KL coefficients over time, as pairs of pure functions over a small state that goes into the checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kljax._checks import as_real, as_type, check_at_least
from kljax._typing import Array, ArrayLike

__all__ = ["Controller", "ControllerState", "adaptive_entropy", "adaptive_kl", "fixed_kl", "pi_kl", "scheduled_kl"]

# The bound on the relative error of Ziegler et al.; every system that adapts the coefficient uses it.
_MAX_ERROR = 0.2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ControllerState:
    """The state of a KL controller; what a controller remembers besides its coefficient is in a field of its own.

    Attributes:
      coef: the current coefficient, a scalar array, never negative; float32, or float64 under x64.
    """

    coef: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _IntegralState(ControllerState):
    """Also the integral of the error so far, times its gain: in the unit of the coefficient."""

    integral: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _CountingState(ControllerState):
    """Also the number of updates so far, int32."""

    count: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _SteppedState(ControllerState):
    """Also the coefficient behind the one in use, which is 0 while it is not needed."""

    level: Array


class Controller(NamedTuple):
    """Two pure functions: `state = init()` and `state = update(state, kl, num_samples)`; both can be jitted.

    Attributes:
      init: makes the first state.
      update: takes the state, the mean KL measured (a scalar, in nats) and the number of samples it was measured on
        (rows), and returns the next state. Read `state.coef` before the update that follows its use.
    """

    init: Callable[[], ControllerState]
    update: Callable[[Any, ArrayLike, ArrayLike], ControllerState]


def fixed_kl(coef: float) -> Controller:
    """A coefficient that stays what it is: `coef_{k+1} = coef_k`.

    Args:
      coef: the coefficient, at least 0.

    Returns:
      A `Controller` whose `update` returns the state it was given.

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
        error = jnp.clip(as_type(as_real(kl), dtype) / target - 1, -_MAX_ERROR, _MAX_ERROR)
        factor = jnp.maximum(1 + error * jnp.asarray(num_samples, dtype) / horizon, 0)
        return ControllerState(jnp.where(jnp.isnan(factor), state.coef, state.coef * factor))

    return Controller(_initial(coef), update)


def pi_kl(
    coef: float,
    *,
    target: float,
    kp: float,
    ki: float,
    min_coef: float = 0.0,
    max_coef: float | None = None,
    max_error: float = 1.0,
) -> Controller:
    """A coefficient that holds the KL at a target: `coef_k = clip(coef + kp e_k + ki sum_{j<=k} e_j)`.

    The error is `e = clip(kl / target - 1, -max_error, max_error)`. The sum removes every lasting difference between
    the KL and its target, which a coefficient in proportion to the error alone would keep, and the proportional part
    damps the swings of a KL that follows the coefficient late. Against wind-up the sum grows only as far as the
    coefficient reaches its bound (conditional integration): when the error turns, the coefficient leaves it at once.

    Args:
      coef: the first coefficient, which also applies where error and sum are 0; at least 0.
      target: the KL to hold, in nats, positive; in the unit of what `update` is given (mean per token, say).
      kp: proportional gain: how far an error of 1, a KL of twice the target, moves the coefficient; at least 0.
      ki: integral gain: how far an error of 1 moves the coefficient for good, per update; at least 0.
      min_coef: lower bound of the coefficient, at least 0.
      max_coef: upper bound of the coefficient; None has no bound.
      max_error: bound of the error, positive: one batch far off counts as this.

    Returns:
      A `Controller`. Its updates are the steps of the sum, whatever their number of samples; one of no samples changes
      nothing, and neither does a KL that is NaN. A KL of infinity counts as `max_error`.

    Raises:
      ValueError: if `coef`, a gain or `min_coef` is negative, `target` or `max_error` is not positive, or the bounds
        leave no room for `coef`.

    References:
      Astrom and Hagglund, "PID controllers: theory, design, and tuning" (1995), section 3.5 (conditional integration);
      Stooke et al., "Responsive safety in reinforcement learning by PID Lagrangian methods" (2020).

    Example:
      >>> import kljax
      >>> controller = kljax.pi_kl(0.1, target=0.1, kp=0.02, ki=0.01)
      >>> state = controller.update(controller.init(), 0.15, 64)
      >>> print(f"{state.coef:.4f}")
      0.1150
    """
    for name, value in (("kp", kp), ("ki", ki), ("min_coef", min_coef)):
        check_at_least(name, value, 0)
    for name, value in (("target", target), ("max_error", max_error)):
        check_at_least(name, value, 0, strict=True)
    check_at_least("max_coef", max_coef, coef)
    check_at_least("coef", coef, min_coef)

    def init() -> ControllerState:
        first = _initial(coef)().coef
        return _IntegralState(first, jnp.zeros_like(first))

    def update(state: _IntegralState, kl: ArrayLike, num_samples: ArrayLike) -> ControllerState:
        dtype = state.coef.dtype
        error = jnp.clip(as_type(as_real(kl), dtype) / target - 1, -max_error, max_error)
        rest = coef + kp * error
        # Up, or down, as far as the bound; not back, where the proportional part alone is beyond it.
        up = down = state.integral + ki * error
        down = jnp.maximum(down, jnp.minimum(state.integral, min_coef - rest))
        if max_coef is not None:
            up = jnp.minimum(up, jnp.maximum(state.integral, max_coef - rest))
        integral = jnp.where(error > 0, up, down)
        new = _IntegralState(jnp.clip(rest + integral, min_coef, max_coef), integral)
        unknown = jnp.isnan(error) | (jnp.asarray(num_samples) == 0)
        return jax.tree.map(lambda old, x: jnp.where(unknown, old, x), state, new)

    return Controller(init, update)


def scheduled_kl(schedule: Callable[[Array], ArrayLike]) -> Controller:
    """A coefficient that follows a plan: `coef_k = max(schedule(k), 0)` after `k` updates, whatever the KL.

    Args:
      schedule: the coefficient as a function of the number of updates, an int32 scalar that may be traced; any schedule
        of optax is one.

    Returns:
      A `Controller`; its coefficient never falls below 0.

    Raises:
      Nothing.

    References:
      Optax, "Optimizer schedules".

    Example:
      >>> import kljax
      >>> controller = kljax.scheduled_kl(lambda count: 0.5 / (1 + count))
      >>> state = controller.init()
      >>> print(state.coef, controller.update(state, 0.2, 64).coef)
      0.5 0.25
    """

    def at(count: Array) -> ControllerState:
        coef = jnp.asarray(schedule(count), jnp.result_type(float))
        return _CountingState(jnp.maximum(coef, 0), count)

    return Controller(
        lambda: at(jnp.zeros((), jnp.int32)),
        lambda state, kl, num_samples: at(state.count + 1),
    )


def adaptive_entropy(
    coef: float, *, target: float, delta: float, min_coef: float = 0.0, max_coef: float = 1.0
) -> Controller:
    """An entropy coefficient that moves in steps towards a target, and is applied only at or below it.

    `c_{k+1} = min(c_k + delta, max_coef)` where the entropy is at most `target`, else `max(c_k - delta, min_coef)`; the
    coefficient to use is `c_{k+1}` in the first case and 0 in the second. Give `update` the mean entropy per token in
    place of the KL. The loss has `- coef * entropy`.

    Args:
      coef: the first `c`, within the bounds.
      target: the entropy to hold, in nats per token, at least 0.
      delta: the step of the coefficient, positive.
      min_coef: lower bound of `c`, at least 0.
      max_coef: upper bound of `c`.

    Returns:
      A `Controller` whose first coefficient is 0, as no entropy has been measured yet. An entropy that is NaN and an
      update of no samples change nothing.

    Raises:
      ValueError: for a negative `target` or `min_coef`, a `delta` that is not positive, or bounds without room for
        `coef`.

    References:
      TRL 1.16, `use_adaptive_entropy`; He et al., "Skywork open reasoner 1 technical report" (2025).

    Example:
      >>> import kljax
      >>> controller = kljax.adaptive_entropy(0.01, target=0.2, delta=0.005)
      >>> state = controller.update(controller.init(), 0.1, 64)
      >>> print(f"{state.coef:.3f} {controller.update(state, 0.3, 64).coef:.3f}")
      0.015 0.000
    """
    for name, value in (("target", target), ("min_coef", min_coef)):
        check_at_least(name, value, 0)
    check_at_least("delta", delta, 0, strict=True)
    check_at_least("coef", coef, min_coef)
    check_at_least("max_coef", max_coef, coef)

    def init() -> ControllerState:
        level = jnp.asarray(coef, jnp.result_type(float))
        return _SteppedState(jnp.zeros_like(level), level)

    def update(state: _SteppedState, entropy: ArrayLike, num_samples: ArrayLike) -> ControllerState:
        measured = as_type(as_real(entropy), state.coef.dtype)
        low = measured <= target
        level = jnp.where(low, jnp.minimum(state.level + delta, max_coef), jnp.maximum(state.level - delta, min_coef))
        new = _SteppedState(jnp.where(low, level, 0), level)
        unknown = jnp.isnan(measured) | (jnp.asarray(num_samples) == 0)
        return jax.tree.map(lambda old, x: jnp.where(unknown, old, x), state, new)

    return Controller(init, update)


def _initial(coef: float) -> Callable[[], ControllerState]:
    check_at_least("coef", coef, 0)
    return lambda: ControllerState(jnp.asarray(coef, jnp.result_type(float)))
