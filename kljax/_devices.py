"""A batch whose rows are spread over devices: its sums, its extremes, and all of its rows on each of them.

In `shard_map` a function sees the rows of its own device; `axis_name` says over which mapped axes the others lie, in
their order. None says that there are no others, and changes nothing; it is not refused for arrays that vary over mapped
axes, as groups may lie on one device whole, and a caller may add the results. On a mesh with Explicit axes, the
default of `jax.make_mesh`, `auto_sharded` lets the compiler spread the operations that JAX has no sharding rule for.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kljax._typing import Array, AxisName

Tree = TypeVar("Tree")
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


def auto_sharded(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a function treat the Explicit mesh axes of its arguments as Auto axes; without any it is called as it is.

    Sorting, scattering and scanning over rows have no sharding rule in JAX. A result whose leading axes are the axes of
    the first sharded argument keeps their sharding, any other is replicated.
    """

    @functools.wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        leaves, structure = jax.tree.flatten((args, kwargs))
        first = next((leaf for leaf in leaves if _explicit_axes(leaf)), None)
        if first is None:
            return function(*args, **kwargs)
        arrays = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

        def of_arrays(arrays: dict[int, Array]) -> Result:
            merged = [arrays.get(index, leaf) for index, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(structure, merged)
            return function(*args, **kwargs)

        shapes = jax.eval_shape(of_arrays, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays))
        out = jax.tree.map(functools.partial(_sharding_like, first), shapes)
        return jax.sharding.auto_axes(of_arrays, axes=_explicit_axes(first), out_sharding=out)(arrays)

    return called


def _explicit_axes(leaf: Any) -> tuple[str, ...]:
    """The Explicit axes of the mesh that an array is split over, none for one that is not split."""
    if not isinstance(leaf, jax.Array):
        return ()
    sharding: Any = jax.typeof(leaf).sharding
    if all(part is None for part in sharding.spec):
        return ()
    kinds = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


def _sharding_like(array: Array, result: jax.ShapeDtypeStruct) -> NamedSharding:
    """The sharding of an array for a result, on the leading axes that the two have in common."""
    sharding: Any = jax.typeof(array).sharding if isinstance(array, jax.core.Tracer) else array.sharding
    common = []
    for size, other, part in zip(result.shape, array.shape, sharding.spec, strict=False):
        if size != other:
            break
        common.append(part)
    return NamedSharding(sharding.mesh, PartitionSpec(*common))


def over_devices(values: Tree, axis_name: AxisName) -> Tree:
    """Sums over the mapped axes; without any returns the values themselves.

    Raises:
      NameError: for an axis that is not mapped here, with the place where it is.
    """
    if axis_name is None:
        return values
    try:
        return jax.lax.psum(values, axis_name)
    except NameError as error:
        error.add_note("axis_name: has a meaning inside of jax.shard_map or jax.vmap only; under jit leave it out")
        raise


def least(values: Array, axis_name: AxisName) -> Array:
    """Takes the smallest value over the mapped axes, a constant."""
    values = jax.lax.stop_gradient(values)
    return values if axis_name is None else jax.lax.pmin(values, axis_name)


def greatest(values: Array, axis_name: AxisName) -> Array:
    """Takes the largest value over the mapped axes, a constant."""
    values = jax.lax.stop_gradient(values)
    return values if axis_name is None else jax.lax.pmax(values, axis_name)


def all_rows(arrays: Tree, axis_name: AxisName) -> Tree:
    """Gathers the rows of every device, one after the other along the first axis."""
    return arrays if axis_name is None else jax.lax.all_gather(arrays, axis_name, tiled=True)


def local_rows(array: Array, axis_name: AxisName) -> Array:
    """Takes the rows of this device from an array of all rows."""
    if axis_name is None:
        return array
    size = array.shape[0] // jax.lax.axis_size(axis_name)
    return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(axis_name) * size, size)


def same_everywhere(values: Array, axis_name: AxisName) -> Array:
    """Marks values that every device computed from all rows as replicated; `shard_map` infers it of reductions."""
    if axis_name is None:
        return values
    return jax.lax.psum(jnp.where(jax.lax.axis_index(axis_name) == 0, values, 0), axis_name)
