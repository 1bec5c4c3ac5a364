"""Eager operations that NumPy runs: XLA takes 20 ms to compile one, which a test runs once or twice.

Outside of `jax.jit` JAX makes a program of every operation. A mistake of a function shows in the operations that it
calls. XLA compiles what a test or the library jits, and operations on several devices, on random keys and on numbers
that NumPy lacks. With KLJAX_TEST_XLA=1, which `make test-isa` and `make test-newest` set, it compiles every operation.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax._src import pjit, sharding_impls
from jax._src.interpreters import pxla
from jax.sharding import SingleDeviceSharding

from tests.numpy_programs import Traced, all_known_to_numpy, run_steps, steps_of

OF_JAX = str(pathlib.Path(jax.__file__).parent)
HOOK = "_pjit_call_impl_python"
# The steps of the programs that NumPy can run; None for the others.
_programs: WeakKeyDictionary[Any, Traced | None] = WeakKeyDictionary()


@contextlib.contextmanager
def run_by_numpy() -> Iterator[None]:
    """Lets NumPy run the eager operations inside the block.

    A release of JAX without this private function compiles them.
    """
    compile_and_run = getattr(pjit, HOOK, None)
    if compile_and_run is None:
        yield
        return

    def run(*args: Any, jaxpr: Any, **params: Any) -> Any:
        results = _run(jaxpr, args) if _is_plain(params) else None
        return compile_and_run(*args, jaxpr=jaxpr, **params) if results is None else (results, None, None, [])

    setattr(pjit, HOOK, run)
    try:
        yield
    finally:
        setattr(pjit, HOOK, compile_and_run)


def _is_plain(params: Mapping[str, Any]) -> bool:
    """Says whether a program has no mesh, sharding, chosen device or donated argument."""
    shardings = {*params["in_shardings"], *params["out_shardings"]}
    unspecified = shardings <= {sharding_impls.UNSPECIFIED} and params["ctx_mesh"].empty
    return unspecified and jax.config.jax_default_device is None and not any(params["donated_invars"])


def _run(closed: Any, args: Sequence[Any]) -> list[jax.Array] | None:
    """Returns the results of an operation of JAX, or None where NumPy does not run it."""
    if closed not in _programs:
        _programs[closed] = steps_of(closed) if _is_of_jax(closed) and all_known_to_numpy(closed) else None
    program = _programs[closed]
    device = jax.devices()[0]
    if program is None or not all(_is_local(arg, device) for arg in args):
        return None
    inputs = [np.asarray(arg, aval.dtype) for arg, aval in zip(args, closed.in_avals, strict=True)]
    sharding = SingleDeviceSharding(device)
    # An array of JAX shares no memory with another one.
    results = [x.copy() if x.base is not None or any(x is y for y in inputs) else x for x in run_steps(program, inputs)]
    return [_as_jax(result, aval, sharding) for result, aval in zip(results, closed.out_avals, strict=True)]


def _is_of_jax(closed: Any) -> bool:
    """Says whether a function of JAX was traced, not one of a test or of the library."""
    return f" at {OF_JAX}" in closed.jaxpr.debug_info.func_src_info


def _is_local(arg: Any, device: jax.Device) -> bool:
    """Says whether it is a number, or an array that is on the first device because no other was named."""
    return not isinstance(arg, jax.Array) or (not arg.committed and arg.sharding.device_set == {device})


def _as_jax(result: np.ndarray, aval: Any, sharding: SingleDeviceSharding) -> jax.Array:
    return pxla.batched_device_put(aval, sharding, [result], list(sharding.device_set), committed=False)
