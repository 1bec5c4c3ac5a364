"""Digests of arrays and texts, with which damage on disk is noticed when these are read back.

The digest of an array hashes two sums of each of its rows, in which every word is weighted by its position: its lanes.
Lanes of shards add up, so a digest does not depend on the sharding, is computed on the devices that have the array, and
no host needs all of it. Damage to one 32-bit word of a row always changes its lanes; other damage is missed with a
probability of about 2^-64, and of at most 2^-34 if only the highest bits of words flipped. Digests notice faults of
disks and memory, not changes that someone makes on purpose.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kljax.checkpoint._lanes import ROWS_OF_CPU, device_lanes, host_lanes
from kljax.checkpoint._trees import first_five, named_leaves, shape_and_dtype

Tree = Any
CONTENT = "kljax"
SEAL = "digest"
LARGE = 1 << 22
"""Bytes of an array in the memory of a CPU from which on a compiled program repays its compilation in thirty saves."""
KIND = "lanes"
"""The kind of the digests of arrays, as each names it; digests of version 0.2 name none."""


def array_digest(array: Any) -> str:
    """Computes the digest of an array: its dtype, its shape, the kind of the digest and 16 hexadecimal digits.

    Args:
      array: of any shape, dtype and sharding, on the host or on devices.

    Returns:
      Text such as `float32[8, 4] lanes:0123456789abcdef`.

    Raises:
      Nothing.

    Example:
      >>> import numpy as np, kljax
      >>> kljax.checkpoint.array_digest(np.ones((8, 4), np.float32))
      'float32[8, 4] lanes:4a1d835c40ba954f'
    """
    return _digest_of(array, *lanes_of([array]))


def _digest_of(array: Any, lanes: Sequence[np.ndarray]) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for part in lanes:
        hashed.update(np.ascontiguousarray(part).data)
    return f"{shape_and_dtype(array)} {KIND}:{hashed.hexdigest()}"


def are_of_this_kind(digests: Mapping[str, str]) -> bool:
    """Whether the digests of a checkpoint are of the kind that this version computes; version 0.2 had another."""
    return all(digest.rpartition(" ")[2].startswith(f"{KIND}:") for digest in digests.values())


def tree_digests(tree: Tree) -> dict[str, str]:
    """Computes the digests of all arrays of a tree, by dotted name.

    Args:
      tree: pytree of arrays.

    Returns:
      The `array_digest` of each array.

    Raises:
      Nothing.

    Example:
      >>> import numpy as np, kljax
      >>> kljax.checkpoint.tree_digests({"a": {"w": np.ones(2, np.float32)}})
      {'a.w': 'float32[2] lanes:75ca910a4217e0df'}
    """
    leaves = named_leaves(tree)
    computed = lanes_of(list(leaves.values()))
    return {name: _digest_of(leaf, lanes) for (name, leaf), lanes in zip(leaves.items(), computed, strict=True)}


def check_digests(label: str, tree: Tree, digests: Mapping[str, str]) -> None:
    """Compares the arrays of a tree with their digests; further digests are ignored.

    Raises:
      ValueError: with `label`, naming the first arrays that differ or have no digest.
    """
    differing = [
        f"{name}: got {digest}, expected {digests.get(name, 'a digest')}"
        for name, digest in tree_digests(tree).items()
        if digest != digests.get(name)
    ]
    if differing:
        raise ValueError(f"{label} is damaged: arrays differ from what was saved: {first_five(differing)}")


def text_hash(text: str | bytes) -> hashlib.blake2b:
    """Starts the hash of a text, to which `update` appends.

    Args:
      text: a string, hashed in UTF-8, or bytes.

    Returns:
      The hash; its `hexdigest` has 32 digits.

    Raises:
      Nothing.

    Example:
      >>> import kljax
      >>> digest = kljax.checkpoint.text_hash("one ")
      >>> digest.update(b"text")
      >>> digest.hexdigest() == kljax.checkpoint.text_hash("one text").hexdigest()
      True
    """
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=16)


def json_digest(content: Mapping[str, Any]) -> str:
    """Computes the digest of JSON values, whatever the order of their keys.

    Args:
      content: values that `json.dumps` takes.

    Returns:
      32 hexadecimal digits.

    Raises:
      TypeError: for values that JSON lacks.

    Example:
      >>> import kljax
      >>> kljax.checkpoint.json_digest({"a": 1, "b": 2}) == kljax.checkpoint.json_digest({"b": 2, "a": 1})
      True
    """
    return text_hash(json.dumps(content, sort_keys=True)).hexdigest()


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Puts a digest beside JSON values, so that damage to the values is noticed too.

    Args:
      content: values that `json.dumps` takes.

    Returns:
      An object of JSON for `open_sealed`.

    Raises:
      TypeError: for values that JSON lacks.

    Example:
      >>> import kljax
      >>> sorted(kljax.checkpoint.seal({"step": 3}))
      ['digest', 'kljax']
    """
    return {CONTENT: content, SEAL: json_digest(content)}


def open_sealed(label: str, sealed: Any) -> dict[str, Any]:
    """Returns the values that `seal` was given, after a comparison with their digest.

    Args:
      label: how the message of the error begins.
      sealed: the object as it was read back, or anything else in its place.

    Returns:
      The values.

    Raises:
      ValueError: with `label`, if the values or their digest changed.

    Example:
      >>> import kljax
      >>> sealed = kljax.checkpoint.seal({"step": 3})
      >>> kljax.checkpoint.open_sealed("the record", sealed)
      {'step': 3}
      >>> sealed["kljax"]["step"] = 4
      >>> kljax.checkpoint.open_sealed("the record", sealed)
      Traceback (most recent call last):
      ValueError: the record is damaged: it differs from what was saved
    """
    content = sealed.get(CONTENT) if isinstance(sealed, dict) else None
    if not isinstance(content, dict) or sealed.get(SEAL) != json_digest(content):
        raise ValueError(f"{label} is damaged: it differs from what was saved")
    return content


def lanes_of(arrays: Sequence[Any], *, large: int = LARGE) -> list[Sequence[np.ndarray]]:
    """Computes the lanes of arrays, each as parts that follow each other.

    Args:
      arrays: on the host or on devices.
      large: as in `inputs_of_programs`.
    """
    programs = inputs_of_programs(arrays, large)
    # Processes that share arrays have to start programs in one order, so one thread starts all of them.
    started = [_start([*inputs.values()]) for inputs in programs]
    compiled = {index for inputs in programs for index in inputs}
    # The programs run meanwhile.
    lanes: dict[int, Sequence[np.ndarray]] = {
        index: [host_lanes(np.asarray(array))] for index, array in enumerate(arrays) if index not in compiled
    }
    for inputs, computed in zip(programs, started, strict=True):
        # `jax.device_get` takes five times as long for many small arrays of a CPU.
        lanes |= zip(inputs, ([np.asarray(part) for part in parts] for parts in computed), strict=True)
    return [lanes[index] for index in range(len(arrays))]


def inputs_of_programs(arrays: Sequence[Any], large: int) -> list[dict[int, jax.Array]]:
    """Groups arrays, by their position, into one program for all that are on the same devices.

    An array that each of its devices has whole is an input on one device. NumPy computes the lanes of its own arrays
    and of arrays in the memory of a CPU that have less than `large` bytes.
    """
    programs: dict[frozenset[Any], dict[int, jax.Array]] = {}
    for index, array in enumerate(arrays):
        if not _is_for_numpy(array, large):
            alone = array.is_fully_replicated and array.is_fully_addressable
            local = array.addressable_data(0) if alone else array
            programs.setdefault(frozenset(local.sharding.device_set), {})[index] = local
    return list(programs.values())


def _start(inputs: list[jax.Array]) -> list[tuple[jax.Array, ...]]:
    """Starts the program that computes the lanes of arrays on the same devices."""
    devices = inputs[0].devices()
    is_one_cpu = len(devices) == 1 and all(device.platform == "cpu" for device in devices)
    return _compiled_lanes(tuple(map(_everywhere, inputs)), ROWS_OF_CPU if is_one_cpu else 1)(inputs)


def _is_for_numpy(array: Any, large: int) -> bool:
    if isinstance(array, np.ndarray | np.generic):
        return True
    if not array.is_fully_addressable or any(device.platform != "cpu" for device in array.devices()):
        return False
    return array.ndim < 2 or array.nbytes < large


def _everywhere(array: jax.Array) -> jax.sharding.Sharding | None:
    sharding = array.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())


@functools.cache
def _compiled_lanes(everywhere: tuple[jax.sharding.Sharding | None, ...], at_once: int) -> Any:
    """Makes the program that computes the lanes of arrays on devices; they are replicated."""
    return jax.jit(lambda arrays: [device_lanes(a, at_once) for a in arrays], out_shardings=list(everywhere))
