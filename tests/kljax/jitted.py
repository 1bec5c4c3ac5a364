"""All calls of a public function as one jitted program, whose trace and whose results are shared by the tests.

A mistake of a function shows in its trace, and XLA takes longer to compile one than NumPy to run its operations. XLA
compiles one function of each kind of program: `EACH_KIND`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.kljax import calls
from tests.kljax.calls import FunctionCall, calls_of, each_call, inputs, traced_program

# Loops over tiles, which hold nearly all of their operations.
WITH_HEAD = (
    *("jsd_from_hidden", "kl_from_hidden", "log_probs_from_hidden"),
    *("renormalized_log_probs", "token_jsd", "token_kl", "token_log_probs", "token_loss_from_hidden"),
)
EACH_KIND = (
    *("ppo_clip_loss", "masked_whiten"),  # operations of one token; sums over tokens
    *("gae", "grpo_advantages"),  # loops over positions; groups of rows
    *("clip_cov_loss", "top_k_with_tail"),  # tokens by their rank, over the batch and over a vocabulary
    "token_log_probs",  # loops over tiles with a derivative of their own
)


@functools.cache
def traced_calls(name: str) -> dict[str, Callable[..., Any]]:
    """By its name, each call as a jitted function of arrays, data and numbers, a coefficient from a state among them.

    JAX keeps its trace for the transformations that use it.
    """

    def traced(call: FunctionCall) -> Callable[..., Any]:
        def value_and_grads(arrays: Any, data: Any, scalars: Any) -> Any:
            return call.value_and_grads(arrays, data, scalars)

        return jax.jit(value_and_grads)

    return {call.name: traced(call) for call in calls_of(name)}


def numbers_of(name: str) -> list[Any]:
    """The numbers of every call as arrays."""
    return [jax.tree.map(jnp.asarray, call.scalars) for call in calls_of(name)]


def each_traced_call(name: str, transform: Callable[..., Any] = lambda function: function) -> Callable[..., Any]:
    """A function of the inputs and the numbers of all calls, each of them transformed."""

    def run(given: list[tuple[Any, Any]], scalars: list[Any]) -> list[Any]:
        numbers, traced = iter(scalars), traced_calls(name)
        return each_call(name, lambda call, *of: transform(traced[call.name])(*of, next(numbers)))(given)

    return run


@functools.cache
def compiled_program(name: str) -> Callable[[list[tuple[Any, Any]]], list[Any]]:
    """Values and gradients of all calls as a function of their inputs, compiled once."""
    scalars = numbers_of(name)
    compiled = calls.program(each_traced_call(name), inputs(name), scalars)
    return lambda given: jax.device_get(compiled(given, scalars))


@functools.cache
def program(name: str) -> Callable[[list[tuple[Any, Any]]], list[Any]]:
    """The same function, run by NumPy unless it is one of `EACH_KIND`."""
    if name in EACH_KIND:
        return compiled_program(name)
    scalars, run = numbers_of(name), traced_program(each_traced_call(name))
    return lambda given: run(given, scalars)
