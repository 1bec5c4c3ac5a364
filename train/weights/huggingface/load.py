"""Loading of a Hugging Face folder into sharded parameters, a few rows of a tensor at a time.

Every stacked leaf is allocated on the devices and then filled in place: rows of a tensor are read, transferred to the
devices of their shards, transposed, rounded and written there. Beyond the weights, host and devices need a few pieces
of `CHUNK_BYTES`, for tensors of any size.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.distributed.exchange import on_leader
from train.distributed.global_arrays import map_shards
from train.models.decoder import Decoder
from train.models.experts import CHOICE_BIAS
from train.models.int8 import is_int8, quantise
from train.models.parameters import abstract_params
from train.weights.huggingface.contents import Contents, check_tied, read_contents
from train.weights.huggingface.names import LeafMapping, leaf_mappings
from train.weights.huggingface.safetensors import CHUNK_BYTES, DTYPES, Tensor
from train.weights.tensor_digests import check_tensors

Tree = Any


def load_params(
    folder: str | Path,
    model: Decoder,
    mesh: Mesh,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    allow_nonfinite: bool = False,
) -> Tree:
    """Loads the base parameters from the safetensors files of a Hugging Face folder.

    Args:
      folder: a directory as `save_pretrained` writes it: one file or several with an index, float32, float16 or
        bfloat16.
      model: the decoder of its `config.json`; weights are rounded to `param_dtype`, or quantized as they are read.
      mesh: the devices; `train.models.sharding` has the sharding rules.
      chunk_bytes: bytes per read.
      allow_nonfinite: whether weights may have NaN and infinity.

    Returns:
      The parameters with the shardings of `train.models.parameters.abstract_params`; biases of the choice of experts,
      which no file has, are 0.

    Raises:
      FileNotFoundError: the folder or its safetensors files are missing.
      ValueError: tensors are missing, left over, or of another shape or dtype (checked before any read); the head is
        tied, and the file has an LM head that differs from the embeddings; a value is not finite; or a tensor
        differs from its digest.
    """
    contents = read_contents(folder, model)
    on_leader("weights", lambda: check_tensors(folder))
    targets = abstract_params(model, mesh)
    check_tied(Path(folder), contents, chunk_bytes)
    by_path = {mapping.path: mapping for mapping in leaf_mappings(model)}
    check = not allow_nonfinite

    def fill(path: Any, target: Tree, leaf: Tree) -> Tree:
        names = tuple(key.key for key in path)
        if names[-1] == CHOICE_BIAS:
            return leaf
        mapping = by_path[names]
        if is_int8(target):
            return _fill(contents, mapping, leaf, None, chunk_bytes, check=check)
        return _view_as(_fill(contents, mapping, leaf, target.dtype, chunk_bytes, check=check), target)

    return jax.tree_util.tree_map_with_path(fill, targets, _zeros(targets, mesh), is_leaf=is_int8)


def _zeros(targets: Tree, mesh: Mesh) -> Tree:
    """Allocates all leaves with one program; they are filled in place, so there is no second copy."""

    def make(target: jax.ShapeDtypeStruct) -> jax.Array:
        # XLA on CPU updates bfloat16 arrays in float32, which converts the entire leaf each time; integers with the
        # same bits avoid this.
        as_bits = target.dtype.itemsize == 2 and mesh.devices.flat[0].platform == "cpu"
        return jnp.zeros(target.shape, jnp.uint16 if as_bits else target.dtype)

    shardings = jax.tree.map(lambda x: x.sharding, targets)
    return jax.jit(lambda: jax.tree.map(make, targets), out_shardings=shardings)()


def _view_as(leaf: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Views the bits of a leaf as the target dtype; memory of a CPU device is shared, not copied."""
    if leaf.dtype == target.dtype:
        return leaf
    return map_shards(lambda shard: shard.view(target.dtype), leaf)


def _fill(
    contents: Contents, mapping: LeafMapping, leaf: Tree, dtype: np.dtype | None, chunk_bytes: int, *, check: bool
) -> Tree:
    """Writes all tensors of a leaf in place, as int8 if `dtype` is None; the leaf is donated."""
    array = leaf["qvalue"] if dtype is None else leaf
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    mesh = sharding.mesh
    spec = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    lead = len(mapping.lead)
    layer_spec = spec[lead:]
    rows = PartitionSpec(*(layer_spec[::-1] if mapping.transposed else layer_spec))
    parts = math.prod(mesh.shape[name] for name in _names(rows[0]))
    if dtype is None:
        write = _int8_writer(mesh, PartitionSpec(*spec), rows)
    else:
        write = _writer(mesh, PartitionSpec(*spec), rows, lead=lead, transposed=mapping.transposed, dtype=dtype)
    for index, name in zip(mapping.indices(), mapping.names, strict=True):
        tensor = contents.tensors[name]
        for start, count in tensor.pieces(chunk_bytes, parts=parts):
            piece = _read(tensor, NamedSharding(mesh, rows), parts, start, count, check=check)
            # Waiting frees the host memory of the piece before the next read.
            leaf = jax.block_until_ready(write(leaf, piece, np.array(index, np.int32), np.int32(start)))
    return leaf


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def _read(tensor: Tensor, sharding: NamedSharding, parts: int, start: int, count: int, *, check: bool) -> jax.Array:
    """Reads rows `start` to `start + count` of each of the `parts` of a tensor onto the devices of the part."""
    local = tensor.shape[0] // parts
    last: dict[int, np.ndarray] = {}

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        part = (index[0].start or 0) // count
        if part not in last:
            last.clear()
            last[part] = tensor.rows(part * local + start, count)
            if check:
                tensor.check_finite(last[part])
        return np.ascontiguousarray(last[part][(slice(None), *index[1:])])

    shape = (parts * count, *tensor.shape[1:])
    return jax.make_array_from_callback(shape, sharding, read, dtype=DTYPES[tensor.dtype])


@functools.cache
def _writer(
    mesh: Mesh, spec: PartitionSpec, rows: PartitionSpec, *, lead: int, transposed: bool, dtype: np.dtype
) -> Callable[..., jax.Array]:
    """Compiles `(leaf, piece, index, start) -> leaf`: every device writes its rows into its shard, in place.

    The index [lead] is that of the tensor in the leading axes of the leaf, over layers and experts.
    """

    def write(leaf: jax.Array, piece: jax.Array, index: jax.Array, start: jax.Array) -> jax.Array:
        block = (piece.T if transposed else piece).astype(dtype)
        if leaf.dtype != dtype:
            block = lax.bitcast_convert_type(block, leaf.dtype)
        first = [jnp.zeros((), jnp.int32)] * block.ndim
        first[-1 if transposed else 0] = start
        return _update(leaf, block.reshape(*(1,) * lead, *block.shape), index, first, spec)

    replicated = PartitionSpec()
    mapped = jax.shard_map(write, mesh=mesh, in_specs=(spec, rows, replicated, replicated), out_specs=spec)
    return jax.jit(mapped, donate_argnums=0)


def _update(
    leaf: jax.Array, block: jax.Array, index: jax.Array, first: Sequence[jax.Array], spec: PartitionSpec
) -> jax.Array:
    """Writes a block into a device's shard, which keeps its values if the index is on another device."""
    start = [*index, *first]
    split = [axis for axis, names in enumerate(spec[: len(index)]) if names is not None]
    for axis in split:
        start[axis] -= lax.axis_index(spec[axis]) * leaf.shape[axis]
    for axis in split:
        is_here = (start[axis] >= 0) & (start[axis] < leaf.shape[axis])
        # Out of the shard both slices are moved to its edge alike.
        block = jnp.where(is_here, block, lax.dynamic_slice(leaf, start, block.shape))
    return lax.dynamic_update_slice(leaf, block, start)


@functools.cache
def _int8_writer(mesh: Mesh, spec: PartitionSpec, rows: PartitionSpec) -> Callable[..., Tree]:
    """Compiles `_writer` for stacked int8 kernels: each tensor row, an output channel, is quantized on its devices."""

    lead = len(spec) - 2

    def write(leaf: Tree, piece: jax.Array, index: jax.Array, start: jax.Array) -> Tree:
        block = quantise(piece.T, axis_name=_names(spec[-2]))
        qvalue, scale = (x.reshape(*(1,) * lead, *x.shape) for x in (block["qvalue"], block["scale"]))
        first = jnp.zeros((), jnp.int32)
        return {
            "qvalue": _update(leaf["qvalue"], qvalue, index, [first, start], spec),
            "scale": _update(leaf["scale"], scale, index, [start], spec),
        }

    specs = {"qvalue": spec, "scale": PartitionSpec(*spec[:-2], spec[-1])}
    replicated = PartitionSpec()
    mapped = jax.shard_map(write, mesh=mesh, in_specs=(specs, rows, replicated, replicated), out_specs=specs)
    shardings = {name: NamedSharding(mesh, leaf_spec) for name, leaf_spec in specs.items()}
    return jax.jit(mapped, donate_argnums=0, out_shardings=shardings)
