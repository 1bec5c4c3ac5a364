"""The mesh, and the one table that says which mesh axis each logical axis of an array lives on."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.config.mesh import AXES, ROW_AXES, WIDTH_AXES, Parts, describe_mesh, usual_sizes

Tree: TypeAlias = Any
HOST = "pinned_host"
"""The memory of the host that devices read and write by themselves; moments may lie there."""
Rules: TypeAlias = Mapping[str, str | tuple[str, ...] | None]
RULES: Rules = {
    "rows": ROW_AXES,
    "tokens": "context",
    "vocab": "tensor",
    "embed": WIDTH_AXES,
    "expert_embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "expert": "expert",
    "router": None,
    "norm": None,
    "layers": None,
    "lora_rank": None,
}


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    slices: int = 1,
    *,
    slice_axis: str = "data",
    expert: int = 1,
    context: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh over the first `data * fsdp * expert * context * tensor` devices.

    With slices, each has an equal part of `slice_axis`, whose collectives alone go over the network between them.

    Args:
      data, fsdp, tensor: sizes of the axes.
      slices: a divisor of the size of `slice_axis`.
      slice_axis: data or fsdp.
      expert: size of the axis that splits the experts of a mixture.
      context: size of the axis that splits the tokens of a row.
      devices: the devices to choose from; None: all devices of the run.

    Raises:
      ValueError: an axis below 1, fewer devices than the mesh needs, or slices that the devices do not lie in.
    """
    sizes = dict(zip(AXES, (data, fsdp, expert, context, tensor), strict=True))
    for name, size in (sizes | {"slices": slices}).items():
        if size < 1:
            raise ValueError(f"mesh.{name}: got {size}, expected at least 1")
    if sizes[slice_axis] % slices:
        raise ValueError(f"mesh.slices: got {slices}, expected a divisor of mesh.{slice_axis} = {sizes[slice_axis]}")
    needed = math.prod(sizes.values())
    devices = jax.devices() if devices is None else devices
    if needed > len(devices):
        got = f"{len(devices)} ({devices[0].platform})"
        raise ValueError(f"mesh: {describe_mesh(sizes)} needs {needed} devices, got {got}")
    types = (AxisType.Auto,) * len(AXES)
    shape = tuple((sizes | {slice_axis: sizes[slice_axis] // slices}).values())
    blocks = [
        jax.make_mesh(shape, AXES, axis_types=types, devices=block).devices
        for block in split_slices(devices, slices, needed // slices)
    ]
    return Mesh(np.concatenate(blocks, AXES.index(slice_axis)), AXES, axis_types=types)


def split_slices(devices: Sequence[jax.Device], slices: int, size: int) -> list[list[jax.Device]]:
    """Takes `size` devices of each slice; equal runs of devices where the backend knows no slices, as on a CPU.

    Raises:
      ValueError: the devices lie in another number of slices, or a slice has fewer devices.
    """
    by_slice: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    if len(by_slice) == slices:
        blocks = [by_slice[number] for number in sorted(by_slice)]
    elif devices[0].platform == "tpu" and len(by_slice) > 1:
        used = {getattr(device, "slice_index", None) for device in devices[:size]} if slices == 1 else set(by_slice)
        if len(used) > 1:
            raise ValueError(
                f"mesh.slices: got {slices}, but the devices lie in {len(by_slice)} slices; set it to that"
            )
        blocks = [list(devices)]
    else:
        # Hosts with GPUs may count as slices of their own; they come in order.
        blocks = [list(devices[number * size :]) for number in range(slices)]
    small = next((block for block in blocks if len(block) < size), None)
    if small is not None:
        raise ValueError(f"mesh: needs {size} devices in each of {slices} slices, got {len(small)}")
    return [block[:size] for block in blocks]


def reshape_mesh(mesh: Mesh, data: int, tensor: int) -> Mesh:
    """Arranges the devices of a mesh, in its order, as `data x expert x tensor`; axes fsdp and context have size 1.

    Axis expert keeps its size.

    One program may use both meshes, as its devices have one order.

    Raises:
      ValueError: another number of devices.
    """
    sizes = {"data": data, "fsdp": 1, "expert": mesh.shape["expert"], "context": 1, "tensor": tensor}
    if math.prod(sizes.values()) != mesh.size:
        raise ValueError(f"rollout.mesh: got data={data} x tensor={tensor}, expected {mesh.size} devices")
    return Mesh(mesh.devices.reshape(*sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_axes(axis: str | None, rules: Rules = RULES) -> tuple[str, ...]:
    """The mesh axes of one logical axis; none for None.

    Raises:
      ValueError: a logical axis that the table does not know.
    """
    if axis is None:
        return ()
    if axis not in rules:
        raise ValueError(f"logical axis: got {axis!r}, expected one of {', '.join(rules)}")
    names = rules[axis]
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def partition_spec(axes: tuple[str | None, ...], rules: Rules = RULES) -> PartitionSpec:
    """Logical axes of one array -> mesh axes.

    Raises:
      ValueError: two logical axes of the array land on the same mesh axis.
    """
    owner: dict[str, str | None] = {}
    for axis in axes:
        for name in mesh_axes(axis, rules):
            if name in owner:
                raise ValueError(
                    f"logical axes {owner[name]!r} and {axis!r} of one array both map to mesh axis {name!r}"
                )
            owner[name] = axis
    entries = (mesh_axes(axis, rules) for axis in axes)
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in entries))


def _sharding(path: Any, axes: PartitionSpec, leaf: Any, mesh: Mesh, rules: Rules) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if len(axes) not in (0, len(leaf.shape)):
        raise ValueError(f"{name}: logical axes {tuple(axes)} do not fit shape {leaf.shape}")
    try:
        spec = partition_spec(tuple(axes), rules)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    for size, axis in zip(leaf.shape, axes, strict=False):
        parts = usual_sizes({name: mesh.shape[name] for name in mesh_axes(axis, rules)})
        if size % math.prod(parts.values()):
            mapped = " x ".join(f"mesh.{name}={count}" for name, count in parts.items())
            raise ValueError(f"{name}: axis {axis!r} of size {size} is not divisible by {mapped} (shape {leaf.shape})")
    return NamedSharding(mesh, spec)


def param_shardings(mesh: Mesh, logical_specs: Any, shapes: Any, rules: Rules = RULES) -> Any:
    """Shardings for a tree of parameters.

    Args:
      mesh: the mesh.
      logical_specs: tree of PartitionSpec of logical axis names (`Structure.param_axes`); `P()` is replicated.
      shapes: tree of the same structure whose leaves have `.shape`.
      rules: logical axis -> mesh axis.

    Raises:
      ValueError: names the parameter; two axes on one mesh axis, or a size that the mesh does not divide.
    """

    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec)

    def sharding_of(path: Any, axes: PartitionSpec, leaf: Any) -> NamedSharding:
        return _sharding(path, axes, leaf, mesh, rules)

    return jax.tree_util.tree_map_with_path(sharding_of, logical_specs, shapes, is_leaf=is_spec)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp, everything else whole."""
    return NamedSharding(mesh, partition_spec(("rows",)))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def with_sharding(tree: Tree, sharding: NamedSharding) -> Tree:
    """Gives every array of a tree of shapes one sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def mesh_is_set() -> bool:
    """Whether a mesh with the axes of the trainer is set (`jax.set_mesh`)."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and all(name in mesh.axis_names for name in AXES)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Hint the layout of an activation inside jit; the array itself where no mesh is set."""
    return jax.lax.with_sharding_constraint(x, partition_spec(axes)) if mesh_is_set() else x


def split_by_hand(
    function: Callable[..., Any], in_axes: Sequence[tuple[str | None, ...]], out_axes: tuple[str | None, ...]
) -> Callable[..., Any]:
    """Wraps a function so that every device runs it on its own part of the arrays; the function itself without a mesh.

    The partitioner would gather the arrays of operations that it does not know, such as a constraint of the layout.

    Args:
      function: of arrays, or trees of arrays, without communication.
      in_axes: the logical axes of each argument; all arrays of a tree have the same.
      out_axes: logical axes of the result.
    """
    if not mesh_is_set():
        return function
    specs = tuple(map(partition_spec, in_axes))
    return jax.shard_map(function, in_specs=specs, out_specs=partition_spec(out_axes), check_vma=False)


def divides(size: int, axis: str) -> bool:
    """Whether the mesh which is set splits `size` entries of a logical axis into equal parts."""
    return size % axis_size(axis) == 0


def split_tokens(x: jax.Array) -> jax.Array:
    """Hint that rows and tokens of an activation [B, T, ...] are split; tokens only if axis context divides them."""
    tokens = "tokens" if divides(x.shape[1], "tokens") else None
    return constrain(x, "rows", tokens, *(None,) * (x.ndim - 2))


def whole_sequences(x: jax.Array) -> jax.Array:
    """Gathers keys or values [B, S, K, H] of split sequences over axis context; the array itself without one."""
    return constrain(x, "rows", None, "kv_heads", None) if axis_size("tokens") > 1 else x


def axis_parts(axis: str, mesh: Mesh | None = None) -> Parts:
    """The parts that a mesh splits a logical axis into; None: the mesh which is set, 1 part where none is."""
    sizes = mesh.shape if mesh is not None else jax.sharding.get_abstract_mesh().shape if mesh_is_set() else {}
    split = usual_sizes({name: sizes.get(name, 1) for name in mesh_axes(axis)})
    return Parts(math.prod(split.values()), tuple(f"mesh.{name}" for name in split))


def axis_size(axis: str, mesh: Mesh | None = None) -> int:
    """The number of `axis_parts`."""
    return axis_parts(axis, mesh).count


def axis_index(axis: str) -> jax.Array:
    """The number of this device along a logical axis, inside of `shard_map` over the mesh which is set."""
    return jax.lax.axis_index(mesh_axes(axis))


def device_kind() -> str:
    """The kind of the devices of the mesh, which may differ from those of this process, or of the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return str(jax.devices()[0].device_kind if abstract is None else abstract.device_kind)


def is_nvidia_bfloat16(dtype: Any) -> bool:
    """Whether the devices of the mesh are NVIDIA GPUs, for which a layer in bfloat16 has kernels of its own."""
    return dtype == jnp.bfloat16 and device_kind().startswith("NVIDIA")


def device_bytes(tree: Tree) -> int:
    """Counts the bytes on a device of arrays, or of shapes with shardings; the memory of the host does not count."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if x.sharding.memory_kind != HOST)


def host_bytes(tree: Tree) -> int:
    """Counts the bytes of arrays in the memory of the host, for one device."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if x.sharding.memory_kind == HOST)


def _shard_bytes(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * int(x.dtype.itemsize)
