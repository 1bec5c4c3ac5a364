"""How far float32 is from the exact answer: `python -m tests.kljax.precision` prints the table.

Every estimator, ratio, weight and loss that is a function of the log-ratio of a token is evaluated at log-ratios of
1e-8 to 50 nats of both signs and at advantages of both signs, in float32 and, for the same float32 numbers, in float64.
The error is relative to the exact answer, for the value and for the gradient to the log-probs; within 10 % of a
log-ratio where the exact answer is 0, to the largest exact answer within those 10 %. Functions and calls come from
`tests.kljax.calls`.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from tests.kljax import calls
from tests.kljax.calls import FunctionCall, callable_functions, calls_of, each_call

MODULES = ("kljax.kl", "kljax.ratios", "kljax.losses")
# Their answer for a token depends on the others, or on more than a log-ratio.
OTHERS = {
    "clip_cov_loss": "chooses tokens by rank",
    "kl_cov_loss": "chooses tokens by rank",
    "m2po_loss": "chooses tokens by rank",
    "gvpo_loss": "a difference to the mean of a group",
    "flowrl_loss": "a difference to the mean of a group",
    "second_moment_mask": "chooses tokens by rank",
    "loglinear_log_probs": "a policy between two others",
    "normalize=": "divides by a mean over the batch",
}
SMALLEST, LARGEST, POINTS = 1e-8, 50.0, 301
# Both signs of a log-ratio, and of an advantage.
ROWS = 4 * POINTS
# Below this the processor takes numbers for 0.
VANISHING = 1e-35
# The exact answer is 0 at these log-ratios, of the value or of the gradient and at one of the advantages. An error
# relative to it has no bound there: one rounding of a log-ratio `x` already changes an answer `f` by `eps |x f'|`. Over
# the NEAR neighbourhood the answer grows to `NEAR |x f'|`, the scale to which the error is relative instead.
NEAR, NEAR_POINTS = 0.1, 401
ROOTS: dict[str, tuple[float, ...]] = {
    "estimate_kl(sampling_log_probs, estimator=k1)": (-1.0,),
    "a2po_loss(coef=0.3)": (1 / 0.3, -1 / 0.3),
    "dro_loss(coef=0.3)": (1 / 0.3, 2 / 0.3, -1 / 0.3, -2 / 0.3),
}


class Error(NamedTuple):
    """The largest relative error of one call, and the log-ratio where it is."""

    call: str
    value: float
    value_at: float
    gradient: float
    gradient_at: float


def is_of_log_ratios(name: str) -> bool:
    """Whether a public function is an estimator, a ratio, a weight or a loss of sampled tokens."""
    module = getattr(kljax, name).__module__
    return module.startswith(MODULES) and "distillation" not in module and name not in OTHERS


def functions() -> list[str]:
    return [name for name in callable_functions() if is_of_log_ratios(name) and "log_probs" in calls.parameters(name)]


def rows(call: FunctionCall, log_probs: np.ndarray, other: np.ndarray, advantages: np.ndarray) -> tuple[Any, Any]:
    """Inputs of a call with one token per row, `[N, 1]`; importance weights are 1, every token is unmasked.

    A row that another is compared with has not moved, so that the loss of a pair is one of a single log-ratio as well.
    """
    ones = np.ones_like(log_probs)
    known = {"log_probs": log_probs, "advantages": advantages, "weights": ones}
    known |= {"rejected_log_probs": -ones, "rejected_ref_log_probs": -ones}
    arrays = {name: known.get(name, other) for name in call.arrays}
    every = jnp.ones((ones.size, 1), bool)

    def all_set(mask: Any) -> Any:
        return kljax.Segments(every, jnp.zeros(every.shape, int)) if isinstance(mask, kljax.Segments) else every

    data = {name: all_set(value) if "mask" in name else value for name, value in call.data.items()}
    return {name: jnp.asarray(value)[:, None] for name, value in arrays.items()}, data


def value_and_slope(call: FunctionCall, arrays: Any, data: Any) -> Any:
    """`[N]` values of tokens or rows and their gradients to the log-probs; None for a result that is no such array."""

    def value(log_probs: jax.Array) -> jax.Array:
        return jax.tree.leaves(call({**arrays, "log_probs": log_probs}, data))[0]

    shape = jax.eval_shape(value, arrays["log_probs"])
    if not jnp.issubdtype(shape.dtype, jnp.floating) or shape.size != arrays["log_probs"].size:
        return None
    out, pull = jax.vjp(value, arrays["log_probs"])
    return out.ravel(), pull(jnp.ones_like(out))[0].ravel()


@functools.cache
def program(name: str) -> Any:
    """All calls of a function, in float32 and in float64; compiled once for each number of rows."""

    def run(call: FunctionCall, arrays: Any, data: Any) -> Any:
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        return value_and_slope(call, arrays, data), value_and_slope(call, wide, data)

    return jax.jit(each_call(name, run))


def evaluate(name: str, log_probs: np.ndarray, other: np.ndarray, advantages: np.ndarray) -> list[Any]:
    """For each call `(in float32, in float64)` of the same float32 numbers; None where `value_and_slope` is.

    Rows do not depend on each other, so few of them are filled up to the number that another test compiles for.
    """
    size = len(log_probs)
    filled = [np.pad(np.float32(x), (0, max(0, ROWS - size)), mode="edge") for x in (log_probs, other, advantages)]
    arguments = [rows(call, *filled) for call in calls_of(name)]
    results = jax.tree.map(lambda x: x[:size], jax.device_get(program(name)(arguments)))
    return [None if narrow is None else (narrow, wide) for narrow, wide in results]


def log_ratios() -> np.ndarray:
    sizes = np.geomspace(SMALLEST, LARGEST, POINTS).astype(np.float32)
    return np.concatenate([-sizes[::-1], sizes])


@functools.cache
def errors_of(name: str) -> list[Error]:
    """The errors of the calls of one function whose result is per token or per row."""
    roots = sorted({root for call in calls_of(name) for root in ROOTS.get(call.name, ())})
    near = [root * np.linspace(1 - NEAR, 1 + NEAR, NEAR_POINTS) for root in roots]
    x = np.tile(np.concatenate([log_ratios(), *near]).astype(np.float32), 2)
    advantages = np.repeat([1.0, -1.0], x.size // 2)
    collected = []
    for call, results in zip(calls_of(name), evaluate(name, x, np.zeros_like(x), advantages), strict=True):
        if results is None or any(other in call.name for other in OTHERS):
            continue
        groups = [
            (np.abs(x / root - 1) <= NEAR) & (advantages == advantage)
            for root in ROOTS.get(call.name, ())
            for advantage in (1.0, -1.0)
        ]
        worst = [_largest(x, narrow, wide, groups) for narrow, wide in zip(*results, strict=True)]
        collected.append(Error(call.name, *worst[0], *worst[1]))
    return collected


def _largest(x: np.ndarray, actual: np.ndarray, exact: np.ndarray, groups: list[np.ndarray]) -> tuple[float, float]:
    """The largest relative error of `actual`, where the exact answer is one of float32's normal numbers, or 0."""
    size = np.abs(exact)
    for group in groups:
        size[group] = size[group].max()
    counted = (size == 0) | ((size > VANISHING) & (size < np.finfo(np.float32).max))
    error = np.abs(np.float64(actual) - exact) / np.where(size == 0, VANISHING, size)
    error = np.where(counted, np.where(np.isnan(error), np.inf, error), 0)
    return float(error.max()), float(x[error.argmax()])


def table() -> Iterator[str]:
    yield f"{'':72} {'value':>8} {'at':>9} {'gradient':>9} {'at':>9}"
    for name in functions():
        for row in errors_of(name):
            yield f"{row.call:72} {row.value:8.1e} {row.value_at:9.2g} {row.gradient:9.1e} {row.gradient_at:9.2g}"


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for line in table():
        print(line)
