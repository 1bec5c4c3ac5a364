"""Weights narrower than float32 on a CPU, read in loops without a float32 copy of all of them.

XLA's CPU backend computes bfloat16 in float32. It moves the conversion of an array out of a loop, also if each step
reads a piece of it, and so makes a float32 copy of the whole array.
"""

import jax
from jax import lax

from kljax._typing import Array


def narrow_on_cpu(x: Array, device_kind: str) -> bool:
    """Whether XLA computes with a float32 copy of an array."""
    return device_kind == "cpu" and x.dtype.itemsize < 4


@jax.custom_jvp
def read_with(x: Array, index: Array) -> tuple[Array, Array]:
    """Returns an array and the index at which a step of a loop reads it, as if both changed in every step.

    The conversion of the array then stays in the loop, where it is fused with the read. It differentiates as the
    identity.
    """
    return lax.optimization_barrier((x, index))


# Without symbolic zeros, a constant array would get a tangent of its size.
read_with.defjvp(lambda primals, tangents: (read_with(*primals), tuple(tangents)), symbolic_zeros=True)
