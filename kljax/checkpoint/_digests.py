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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from kljax.checkpoint._lanes import device_lanes, host_lanes
from kljax.checkpoint._trees import first_five, named_leaves, shape_and_dtype

Tree = Any
CONTENT, SEAL = "kljax", "digest"
LARGE = 1 << 24
"""Bytes of an array in the memory of a CPU from which on a compiled program repays its compilation in a few saves."""
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
    if _is_for_numpy(array):
        return _digest_of(array, host_lanes(np.asarray(array)))
    local = array.addressable_data(0) if array.is_fully_replicated and array.is_fully_addressable else array
    return _digest_of(array, jax.device_get(_lanes_on_devices(local)))


def _digest_of(array: Any, lanes: np.ndarray) -> str:
    hashed = hashlib.blake2b(np.ascontiguousarray(lanes).data, digest_size=8)
    return f"{shape_and_dtype(array)} {KIND}:{hashed.hexdigest()}"


def are_of_this_kind(digests: Mapping[str, str]) -> bool:
    """Whether the digests of a checkpoint are of the kind that this version computes; version 0.2 had another."""
    return all(digest.rpartition(" ")[2].startswith(f"{KIND}:") for digest in digests.values())


def tree_digests(tree: Tree) -> dict[str, str]:
    """Computes the digests of all arrays of a tree in parallel, by dotted name.

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
    # Devices and processes that share arrays have to start programs in one order, so not from several threads.
    lanes = _lanes_of_spread({name: leaf for name, leaf in leaves.items() if _is_spread(leaf)})

    def digest(item: tuple[str, Any]) -> str:
        name, leaf = item
        return _digest_of(leaf, lanes[name]) if name in lanes else array_digest(leaf)

    with ThreadPoolExecutor() as pool:
        return dict(zip(leaves, pool.map(digest, leaves.items()), strict=True))


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


def _is_for_numpy(array: Any) -> bool:
    """Whether NumPy computes the lanes: of its own arrays, and of small arrays on CPUs, not worth a compilation."""
    if isinstance(array, np.ndarray | np.generic):
        return True
    if not array.is_fully_addressable or any(device.platform != "cpu" for device in array.devices()):
        return False
    return array.ndim < 2 or array.nbytes < LARGE


def _is_spread(array: Any) -> bool:
    """Whether several devices compute the lanes together: of an array that no device of this process has alone."""
    if _is_for_numpy(array) or not isinstance(array, jax.Array):
        return False
    return not array.is_fully_addressable or not array.is_fully_replicated


def _lanes_of_spread(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Computes the lanes of arrays over several devices, in one program for all that are on the same devices."""
    groups: dict[frozenset[Any], dict[str, jax.Array]] = {}
    for name, array in arrays.items():
        groups.setdefault(frozenset(array.sharding.device_set), {})[name] = array
    lanes: dict[str, np.ndarray] = {}
    for group in groups.values():
        computed = _compiled_lanes(tuple(map(_everywhere, group.values())))(list(group.values()))
        lanes |= dict(zip(group, jax.device_get(computed), strict=True))
    return lanes


def _lanes_on_devices(array: jax.Array) -> jax.Array:
    return _compiled_lanes((_everywhere(array),))([array])[0]


def _everywhere(array: jax.Array) -> jax.sharding.Sharding | None:
    sharding = array.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())


@functools.cache
def _compiled_lanes(everywhere: tuple[jax.sharding.Sharding | None, ...]) -> Any:
    """Compiles the lanes of arrays on devices; they are replicated."""
    return jax.jit(lambda arrays: [device_lanes(array) for array in arrays], out_shardings=list(everywhere))
