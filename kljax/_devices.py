"""A batch whose rows are spread over devices: its sums, its extremes, and all of its rows on each of them.

In `shard_map` a function sees the rows of its own device; `axis_name` says over which mapped axes the others lie, in
their order. None says that there are no others, and gives back what was given.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

from kljax._typing import Array, AxisName

Tree = TypeVar("Tree")


def over_devices(values: Tree, axis_name: AxisName) -> Tree:
    """The sum over the mapped axes, or the values themselves where there are none."""
    return values if axis_name is None else jax.lax.psum(values, axis_name)


def least(values: Array, axis_name: AxisName) -> Array:
    """The smallest value over the mapped axes, a constant."""
    values = jax.lax.stop_gradient(values)
    return values if axis_name is None else jax.lax.pmin(values, axis_name)


def greatest(values: Array, axis_name: AxisName) -> Array:
    """The largest value over the mapped axes, a constant."""
    values = jax.lax.stop_gradient(values)
    return values if axis_name is None else jax.lax.pmax(values, axis_name)


def all_rows(arrays: Tree, axis_name: AxisName) -> Tree:
    """The rows of every device, one after the other along the first axis."""
    return arrays if axis_name is None else jax.lax.all_gather(arrays, axis_name, tiled=True)


def own_rows(array: Array, axis_name: AxisName) -> Array:
    """Of an array of all rows those of this device."""
    if axis_name is None:
        return array
    size = array.shape[0] // jax.lax.axis_size(axis_name)
    return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(axis_name) * size, size)


def same_everywhere(values: Array, axis_name: AxisName) -> Array:
    """Values that each device has from all rows, marked as such: `shard_map` knows it of sums and extremes only."""
    if axis_name is None:
        return values
    return jax.lax.psum(jnp.where(jax.lax.axis_index(axis_name) == 0, values, 0), axis_name)
