"""Rows of host arrays on the mesh."""

from typing import Any

import jax
from jax.sharding import Mesh

from train.distributed.global_arrays import held_rows, place_rows
from train.models.sharding import axis_parts, batch_sharding


def shard_rows(tree: Any, mesh: Mesh) -> Any:
    """Put host arrays on the mesh, split over their leading axis; they have the rows that this process holds.

    Raises:
      ValueError: names the field whose rows the mesh does not divide.
    """
    parts = axis_parts("rows", mesh)
    local = len(held_rows(batch_sharding(mesh), parts.count))

    def put(path: Any, leaf: Any) -> jax.Array:
        if leaf.shape[0] % (parts.count if isinstance(leaf, jax.Array) else local):
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "array"
            raise ValueError(f"{name}: {leaf.shape[0]} rows are not divisible by {parts}")
        return place_rows(leaf, batch_sharding(mesh))

    return jax.tree_util.tree_map_with_path(put, tree)
