"""Rows of global arrays: which process holds and judges them, onto the devices, and back to the host."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from train.config.errors import UserError
from train.distributed.exchange import exchange
from train.distributed.peers import process, processes

Tree = Any


def device_count() -> int:
    """Counts the devices of all processes."""
    return jax.device_count()


def processes_of(mesh: Mesh) -> set[int]:
    """Returns the processes that have devices in a mesh."""
    return {device.process_index for device in mesh.devices.flat}


def are_processes_whole(mesh: Mesh) -> bool:
    """Whether every index of the first axis of a mesh lies in one process.

    With weights that are split over the other axes alone, each process then has all of them.
    """
    return all(len({device.process_index for device in part.flat}) == 1 for part in mesh.devices)


def mesh_of_process(mesh: Mesh) -> Mesh:
    """Returns the indices of the first axis of a mesh that this process has, `are_processes_whole`."""
    if processes() == 1:
        return mesh
    own = [part for part in mesh.devices if part.flat[0].process_index == process()]
    return Mesh(np.stack(own), mesh.axis_names, axis_types=mesh.axis_types)


def arrays_of_process(tree: Tree, mesh: Mesh) -> Tree:
    """Takes the parts of arrays that this process has as whole arrays on `mesh_of_process`, without a copy."""

    def take(leaf: jax.Array) -> jax.Array:
        assert isinstance(leaf.sharding, NamedSharding)
        parts = {shard.device: shard.data for shard in leaf.addressable_shards}
        sharding = NamedSharding(mesh, leaf.sharding.spec)
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [parts[x] for x in mesh.devices.flat])

    return tree if processes() == 1 else jax.tree.map(take, tree)


def row_owners(sharding: Sharding, rows: int) -> np.ndarray:
    """Computes the process that judges each row: one that has it on its devices.

    Args:
      sharding: of an array `[rows, ...]`, split over its first axis only.
      rows: number of rows, which the sharding divides.

    Returns:
      Process numbers `[rows]`, int32. Processes with the same rows, such as the processes of a tensor axis, share them.
    """
    holders: dict[tuple[int, int], set[int]] = {}
    devices: Mapping[Any, Any] = sharding.devices_indices_map((rows,))
    for device, index in devices.items():
        holders.setdefault(_bounds(index[0], rows), set()).add(device.process_index)
    owners = np.zeros(rows, np.int32)
    for (first, last), who in holders.items():
        owners[first:last] = np.array(sorted(who))[np.arange(last - first) * len(who) // (last - first)]
    return owners


def own_rows(sharding: Sharding, rows: int) -> np.ndarray:
    """Lists the rows that this process judges, in order; every row belongs to one process."""
    return np.arange(rows) if processes() == 1 else np.flatnonzero(row_owners(sharding, rows) == process())


def held_rows(sharding: Sharding, rows: int) -> np.ndarray:
    """Lists the rows that the devices of this process hold, in order; several processes may hold one row."""
    bounds = {_bounds(index[0], rows) for index in sharding.addressable_devices_indices_map((rows,)).values() if index}
    return np.concatenate([np.arange(*pair) for pair in sorted(bounds)]) if bounds else np.zeros(0, int)


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """The rows of global arrays that this process has to do with.

    Attributes:
      count: number of rows of all processes.
      held: the rows that the devices of this process hold, in order; several processes may hold one row.
      own: the rows among them that it judges, in order; every row belongs to one process.
    """

    count: int
    held: np.ndarray
    own: np.ndarray

    @classmethod
    def of(cls, sharding: Sharding, count: int) -> "RowSplit":
        """Returns the split of arrays `[count, ...]`."""
        return cls(count, held_rows(sharding, count), own_rows(sharding, count))

    def first(self, count: int) -> "RowSplit":
        """Returns the split in which only the first rows are judged."""
        return dataclasses.replace(self, count=count, own=self.own[self.own < count])

    def select_own(self, array: Any) -> np.ndarray:
        """Copies the own rows to the host, from an array on the devices or one of the held rows."""
        host = to_host_rows(array) if isinstance(array, jax.Array) else array
        return host[np.searchsorted(self.held, self.own)]


def place_rows(tree: Tree, sharding: Sharding) -> Tree:
    """Puts the rows that this process holds on its devices, as parts of global arrays.

    Args:
      tree: host arrays with the rows `held_rows`; or arrays on the devices, which are whole already.
      sharding: of the global arrays, split over their first axis only.

    Returns:
      Arrays on the devices of all processes.
    """
    return jax.tree.map(lambda leaf: _place_leaf(leaf, sharding), tree)


def place_whole(tree: Tree, sharding: Sharding) -> Tree:
    """Puts arrays that are equal on every host on the devices, with one sharding for all."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def place_leaf(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == sharding.device_set:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place_leaf, tree)


def to_host(tree: Tree) -> Tree:
    """Copies whole arrays to every host, in one transfer."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = ((i, x) for i, x in enumerate(leaves) if isinstance(x, jax.Array))
    spread = [i for i, x in arrays if not (x.is_fully_addressable or x.is_fully_replicated)]
    if spread:
        replicated = _replicated(leaves[spread[0]].sharding)
        for index, leaf in zip(spread, _replicate(replicated)([leaves[i] for i in spread]), strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(structure, jax.device_get(leaves))


def to_host_rows(tree: Tree) -> Tree:
    """Copies the rows of `held_rows` to the host; the arrays are split over their first axis only."""

    def copy(leaf: jax.Array) -> Any:
        if leaf.is_fully_addressable:
            return leaf
        shards = {_bounds(shard.index[0], leaf.shape[0]): shard.data for shard in leaf.addressable_shards}
        return np.concatenate(jax.device_get([shards[bounds] for bounds in sorted(shards)]))

    return jax.device_get(jax.tree.map(copy, tree))


def map_shards(function: Callable[[np.ndarray], np.ndarray], array: jax.Array) -> jax.Array:
    """Applies a function that keeps shapes to each shard of this process, on the host."""
    shards = [jax.device_put(function(np.asarray(x.data)), x.device) for x in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def gather_rows(label: str, values: Mapping[str, np.ndarray], rows: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Collects rows from all processes: the same whole arrays in every process, bit for bit.

    Args:
      label: what is collected.
      values: arrays by name, each `[len(rows), ...]`.
      rows: the rows of this process; every row comes from one process.
      count: number of rows of all processes.

    Returns:
      Arrays by name, each `[count, ...]`.

    Raises:
      UserError: two processes have different names.
    """
    if processes() == 1:
        return {name: np.asarray(array) for name, array in values.items()}
    local = {name: np.asarray(array) for name, array in {"": rows, **values}.items()}
    # In place, the names keep their order.
    packed = exchange(label, msgpack_serialize(local, in_place=True) if len(rows) else b"")
    parts = {number: msgpack_restore(part) for number, part in enumerate(packed) if part}
    (first, expected), *others = parts.items()
    for number, part in others:
        if part.keys() != expected.keys():
            got, want = (", ".join(sorted(names - {""})) or "nothing" for names in (part.keys(), expected.keys()))
            raise UserError(f"{label}: process {number} has {got}, process {first} has {want}; expected the same names")
    order = np.argsort(np.concatenate([part[""] for part in parts.values()]))
    if len(order) != count:
        raise ValueError(f"{label}: got {len(order)} rows from all processes, expected {count}")
    return {name: np.concatenate([part[name] for part in parts.values()])[order] for name in expected if name}


def _place_leaf(leaf: Any, sharding: Sharding) -> jax.Array:
    if isinstance(leaf, jax.Array) or sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    # The parts are of one size, so the number of all rows follows from that of this process.
    parts = sharding.num_devices
    rows = len(leaf) * parts // len(held_rows(sharding, parts))
    return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), (rows, *leaf.shape[1:]))


def _replicated(sharding: Sharding) -> NamedSharding:
    assert isinstance(sharding, NamedSharding)
    return NamedSharding(sharding.mesh, PartitionSpec())


@functools.cache
def _replicate(sharding: NamedSharding) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda arrays: arrays, out_shardings=sharding)


def _bounds(index: slice, rows: int) -> tuple[int, int]:
    first, last, _ = index.indices(rows)
    return first, last
