"""Reference policies: the frozen policy that the KL is measured against.

A policy is a pair `(params, adapter)`, and so is the reference. The base model with the adapter off therefore shares
the arrays of the policy and costs no memory. The other sources restore one half of the pair from disk with orbax,
directly into the shapes and shardings of an abstract tree.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from kljax._typing import Array
from kljax.checkpoint import check_fits, read_metadata, restore

__all__ = [
    "Policy",
    "adapter_reference",
    "base_reference",
    "check_tree",
    "checkpoint_reference",
    "fingerprint",
    "restore_tree",
]

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Policy:
    """Base weights with an optional LoRA adapter.

    Attributes:
      params: pytree of base weights.
      adapter: pytree of adapter weights, or None for the base model alone.

    Example:
      >>> import kljax
      >>> kljax.Policy({"w": 1.0}).adapter is None
      True
    """

    params: Tree
    adapter: Tree = None


def base_reference(policy: Policy) -> Policy:
    """Returns the base model, the same weights with the adapter off: `(params, None)`.

    Args:
      policy: the policy being trained. It must have an adapter; without one, training moves its base weights.

    Returns:
      A policy whose `params` are the same array objects as in `policy`: no second copy of the weights.

    Gradient:
      The weights are the policy's own, so the caller applies `stop_gradient` to the log-probs of the reference.

    Raises:
      ValueError: if `policy` has no adapter.

    References:
      von Werra et al., TRL (`ref_model=None` with PEFT); Hu et al., "LoRA" (2021).

    Example:
      >>> import kljax
      >>> kljax.base_reference(kljax.Policy({"w": 1.0}, {"a": 2.0}))
      Policy(params={'w': 1.0}, adapter=None)
    """
    if policy.adapter is None:
        raise ValueError("policy.adapter: got None; without an adapter the base weights are the ones being trained")
    return Policy(policy.params, None)


def adapter_reference(
    policy: Policy, path: str | pathlib.Path, abstract_adapter: Tree, *, item: str | None = None
) -> Policy:
    """Combines the base weights of the policy with an adapter that orbax saved.

    Args:
      policy: supplies the base weights, which are shared, not copied.
      path: directory that orbax wrote.
      abstract_adapter: pytree of `jax.ShapeDtypeStruct` with shardings, the adapter's structure.
      item: dotted path of the adapter inside the checkpoint; None if the checkpoint is the adapter.

    Returns:
      A policy with the restored adapter, sharded as `abstract_adapter` says.

    Raises:
      FileNotFoundError: if there is no checkpoint at `path`.
      ValueError: if structure or shapes differ from `abstract_adapter`.

    References:
      Hu et al., "LoRA" (2021).

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, kljax, orbax.checkpoint as ocp
      >>> path, adapter = tempfile.mkdtemp() + "/adapter", {"a": jnp.ones(2)}
      >>> with ocp.StandardCheckpointer() as checkpointer:
      ...     checkpointer.save(path, adapter)
      >>> abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), adapter)
      >>> print(kljax.adapter_reference(kljax.Policy({"w": 1.0}), path, abstract).adapter["a"])
      [1. 1.]
    """
    return Policy(policy.params, restore_tree(path, abstract_adapter, item=item))


def checkpoint_reference(path: str | pathlib.Path, abstract_params: Tree, *, item: str | None = None) -> Policy:
    """Loads a policy without an adapter from weights that orbax saved.

    Args:
      path: directory that orbax wrote.
      abstract_params: pytree of `jax.ShapeDtypeStruct` with shardings, the structure of the weights.
      item: dotted path of the weights inside the checkpoint; None if the checkpoint is the weights.

    Returns:
      A policy with the restored weights, sharded as `abstract_params` says.

    Raises:
      FileNotFoundError: if there is no checkpoint at `path`.
      ValueError: if structure or shapes differ from `abstract_params`.

    References:
      Orbax, checkpointing PyTrees.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, kljax, orbax.checkpoint as ocp
      >>> path, params = tempfile.mkdtemp() + "/params", {"w": jnp.ones(2)}
      >>> with ocp.StandardCheckpointer() as checkpointer:
      ...     checkpointer.save(path, params)
      >>> abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
      >>> print(kljax.checkpoint_reference(path, abstract).params["w"])
      [1. 1.]
    """
    return Policy(restore_tree(path, abstract_params, item=item), None)


def restore_tree(path: str | pathlib.Path, abstract: Tree, *, item: str | None = None) -> Tree:
    """Restores a pytree, or one subtree of a larger checkpoint, into the given shapes and shardings.

    Args:
      path: directory that orbax wrote.
      abstract: pytree of `jax.ShapeDtypeStruct` with shardings. Shapes and dtypes must equal the ones on disk.
      item: dotted path of a subtree, such as "trainable.adapter"; None restores the whole checkpoint.

    Returns:
      A pytree of arrays, each created directly in its sharding.

    Raises:
      FileNotFoundError: if there is no checkpoint at `path`.
      ValueError: if the structure, a shape or a dtype differs, naming the first leaves that do; if an array cannot be
        read, or differs from its digest, which the trainer saves beside its arrays.

    References:
      Orbax, `PyTreeRestore` with `partial_restore`.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, kljax, orbax.checkpoint as ocp
      >>> path, tree = tempfile.mkdtemp() + "/tree", {"policy": {"w": jnp.ones(2)}, "step": jnp.zeros(())}
      >>> with ocp.StandardCheckpointer() as checkpointer:
      ...     checkpointer.save(path, tree)
      >>> abstract = {"w": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=tree["step"].sharding)}
      >>> print(kljax.restore_tree(path, abstract, item="policy")["w"])
      [1. 1.]
    """
    return restore(read_metadata(path), abstract, item=item)


def check_tree(path: str | pathlib.Path, abstract: Tree, *, item: str | None = None) -> None:
    """Checks that `restore_tree` with these arguments would fit, from the metadata alone.

    Args:
      path: directory that orbax wrote.
      abstract: pytree of `jax.ShapeDtypeStruct`. Shapes and dtypes must equal the ones on disk.
      item: dotted path of a subtree; None means the whole checkpoint.

    Returns:
      Nothing.

    Raises:
      FileNotFoundError: if there is no checkpoint at `path`.
      ValueError: if the structure, a shape or a dtype differs, naming the first leaves that do.

    References:
      Orbax, checkpoint metadata.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, kljax
      >>> try:
      ...     kljax.check_tree(tempfile.mkdtemp() + "/none", {"w": jax.ShapeDtypeStruct((2,), jnp.float32)})
      ... except FileNotFoundError as error:
      ...     print(str(error).split(" at ")[0])
      no checkpoint
    """
    check_fits(read_metadata(path), abstract, item=item)


def fingerprint(tree: Tree) -> Array:
    """Computes a checksum of every bit of every leaf, on the devices of the leaf; equal trees have equal fingerprints.

    A multiplicative hash mixes each 32-bit word of a leaf with its position; the sum modulo 2^32 is the checksum. One
    changed bit changes it, and no array travels to the host.

    Args:
      tree: pytree of arrays of any type and sharding.

    Returns:
      `[leaves]` unsigned 32-bit integers, in the order of `jax.tree.leaves`.

    Raises:
      Nothing.

    References:
      Knuth, "The Art of Computer Programming" vol. 3, section 6.4 (multiplicative hashing).

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(bool((kljax.fingerprint({"w": jnp.ones(3)}) == kljax.fingerprint({"w": jnp.ones(3)})).all()))
      True
    """
    return jnp.stack([_leaf_hash(leaf) for leaf in jax.tree.leaves(tree)])


def _leaf_hash(leaf: Array) -> Array:
    leaf = jnp.asarray(leaf)
    unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}") if leaf.dtype != jnp.bool_ else jnp.dtype("uint8")
    bits = leaf.astype(unsigned) if leaf.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(leaf, unsigned)
    if unsigned.itemsize == 8:
        high = (bits >> jnp.asarray(32, unsigned)).astype(jnp.uint32)
        words = bits.astype(jnp.uint32) ^ (high * jnp.uint32(0x85EBCA6B))
    else:
        words = bits.astype(jnp.uint32)
    position = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    mixed = (words ^ (position * jnp.uint32(0x9E3779B1))) * jnp.uint32(0xC2B2AE35)
    mixed = (mixed ^ (mixed >> jnp.uint32(15))) * jnp.uint32(0x27D4EB2F)
    return mixed.sum(dtype=jnp.uint32)
