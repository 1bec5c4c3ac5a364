"""Inputs of bfloat16 and float16: computed in float32, and to the numbers of the same inputs widened first."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from tests.kljax import calls
from tests.kljax.calls import FunctionCall, callable_functions, calls_of

pytestmark = pytest.mark.xla

# These move arrays of any type, and keep it.
KEEP_THE_DTYPE = {"bema_reference", "ema_reference", "refreshed_reference", "shift_right"}
NARROW = (jnp.bfloat16, jnp.float16)
# What may be done with a narrow number before it is widened: move it, choose it, compare it; nothing that rounds.
EXACT = {
    *(
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "gather",
        "optimization_barrier",
        "pad",
        "reshape",
        "rev",
        "select_n",
    ),
    *("slice", "squeeze", "stop_gradient", "transpose", "bitcast_convert_type"),
    *("dynamic_slice", "dynamic_update_slice"),
    *("eq", "ge", "gt", "is_finite", "le", "lt", "ne"),
}


def in_dtype(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a program, those of its inner programs in place of the one that calls them."""
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        for body in inner:
            yield from equations(body)
        if not inner:
            yield equation


def computes_in(dtype: Any, equation: Any) -> bool:
    avals = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    if equation.primitive.name == "dot_general" and avals[-1].dtype == jnp.float32:
        return False  # the product of two narrow numbers is exact in float32, and they are added up there
    return any(getattr(aval, "dtype", None) == dtype for aval in avals)


def check_computed_in_float32(call: FunctionCall, dtype: Any) -> None:
    """Reads off the program, not its numbers: XLA may keep a sum in float32 on one device that it rounds on another."""
    arrays = in_dtype(call.arrays, dtype)
    program, shapes = jax.make_jaxpr(call.value_and_grads, return_shape=True)(arrays, call.data)
    done = {e.primitive.name for e in equations(program.jaxpr) if computes_in(dtype, e)}
    assert done <= EXACT, f"{call.name} computes in {dtype.__name__}: {done - EXACT}"
    floats = [x.dtype for x in jax.tree.leaves(shapes[0]) if jnp.issubdtype(x.dtype, jnp.floating)]
    # The state of a controller has the float type of JAX, and so has what has no array of floats to go by.
    free = not call.arrays or hasattr(shapes[0], "coef")
    assert free or set(floats) <= {jnp.dtype(jnp.float32)}, f"{call.name}: {floats}"


WIDENED = sorted(set(callable_functions()) - KEEP_THE_DTYPE)


@pytest.mark.parametrize("name", WIDENED)
def test_narrow_inputs_are_computed_in_float32(name: str) -> None:
    for call in calls_of(name):
        check_computed_in_float32(call, jnp.bfloat16)
    # The library does not ask which narrow type it is given.
    check_computed_in_float32(calls_of(name)[0], jnp.float16)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WIDENED)
def test_every_call_computes_float16_in_float32(name: str) -> None:
    for call in calls_of(name)[1:]:
        check_computed_in_float32(call, jnp.float16)


# What a matrix unit multiplies in the backward pass has the type of the head, the slopes of the logits too: an error of
# one rounding per term of a sum, which is small beside the largest gradient and not beside those that cancel.
ROUND_THE_SLOPES = (
    *("log_probs_from_hidden", "token_log_probs", "token_loss_from_hidden", "renormalized_log_probs"),
    *("kl_from_hidden", "jsd_from_hidden", "token_kl", "token_jsd"),
)


def check_same_but_rounded(actual: Any, wide: Any, where: str, slopes: Any = None) -> None:
    """Every array is the one of float32, to 1e-6 of the largest in it, rounded to the type that it has itself.

    `slopes` is the type of what was rounded on the way to a gradient.
    """
    share = 1e-6 if slopes is None else float(jnp.finfo(slopes).eps)
    assert jax.tree.structure(actual) == jax.tree.structure(wide), where
    for (path, leaf), other in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(wide), strict=True):
        label = f"{where}{jax.tree_util.keystr(path)}"
        if not jnp.issubdtype(other.dtype, jnp.floating):
            np.testing.assert_array_equal(leaf, other, label)
            continue
        type_ = jnp.finfo(leaf.dtype)
        rounding = 0.0 if leaf.dtype == other.dtype else float(type_.eps) / 2
        expected = np.asarray(other, np.float64)
        largest = np.max(np.abs(expected), initial=0, where=np.isfinite(expected))
        bounds = {"rtol": rounding + 1e-6, "atol": share * largest + float(type_.smallest_subnormal)}
        np.testing.assert_allclose(np.asarray(leaf, np.float64), expected, **bounds, err_msg=label)


# A checksum of the bits that an array has, other ones in another type.
OF_BITS = {"fingerprint"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(set(callable_functions()) - OF_BITS))
def test_narrow_inputs_give_the_numbers_of_float32(name: str) -> None:
    def run(call: FunctionCall, arrays: Any, data: Any) -> Any:
        if name in KEEP_THE_DTYPE:  # a sum over its results would itself round
            return [(call(x, data), ()) for x in arrays]
        return [call.value_and_grads(x, data) for x in arrays]

    arguments = []
    for arrays, data in calls.inputs(name):
        narrow = [in_dtype(arrays, dtype) for dtype in NARROW]
        # Inputs of their own, so that XLA cannot see that both are the same.
        arguments.append(([*narrow, *(in_dtype(x, jnp.float32) for x in narrow)], data))
    for call, results in zip(calls_of(name), calls.compiled(calls.each_call(name, run), arguments), strict=True):
        for dtype, actual, wide in zip(NARROW, results[:2], results[2:], strict=True):
            check_same_but_rounded(actual[0], wide[0], f"{call.name} of {dtype.__name__}")
            slopes = dtype if name in ROUND_THE_SLOPES else None
            check_same_but_rounded(actual[1], wide[1], f"gradient of {call.name} of {dtype.__name__}", slopes)
