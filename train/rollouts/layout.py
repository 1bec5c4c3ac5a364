"""The layout of the weights for sampling: a mesh of the same devices, on which no decode step gathers a weight."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kljax
from train.models import Decoder
from train.models.parameters import abstract_adapter, abstract_params
from train.models.sharding import AXES, RULES, Rules, axis_size, device_bytes
from train.rl.tracing import traced_once

Tree = Any
SAMPLING_RULES = {**RULES, "embed": None}
"""A decode step gathers no weight: axis expert splits experts alone."""


class SamplingLayout:
    """A mesh, the shardings and dtypes of weights on it, and the weights that were laid out last.

    Attributes:
      mesh: of the sampler's programs; axis fsdp has size 1, unless it is the mesh of the update.
      model: the decoder with the sampler's dtype.
      in_place: whether the sampler reads the weights where the update has them.
      line: the choice in one line, for the user.
      unroll: whether decoding unrolls the layers; None: where the compiler would copy them.

    Args:
      training: the mesh of the update.
      mesh: over the same devices in the same order, from `reshape_mesh`; or the mesh of the update itself.
      model: the decoder with the sampler's dtype.
      narrows: whether weights that the decoder rounds before use are rounded once, when they are laid out.
      wide_head: leaves the LM head in its dtype, as the update reads it.
      rules: mesh axes of weights; None: the update's on its own mesh, `SAMPLING_RULES` on another.
    """

    def __init__(
        self,
        training: Mesh,
        mesh: Mesh,
        model: Decoder,
        *,
        narrows: bool = True,
        wide_head: bool = True,
        rules: Rules | None = None,
    ) -> None:
        self.mesh = mesh
        self.model = model
        self.line = ""
        self.unroll: bool | None = None
        self._training = training
        self._wide_head = wide_head
        if rules is None:
            rules = RULES if mesh is training else SAMPLING_RULES
        # Adapters are small, and stay in the dtype in which they are trained.
        params = abstract_params(model, mesh, rules)
        self._parts = {"params": self._narrowed(params) if narrows else params}
        if model.config.lora is not None:
            self._parts["adapter"] = abstract_adapter(model, mesh, rules)
        before = abstract_params(model, training)
        self.in_place = mesh is training and rules is RULES and _dtypes(before) == _dtypes(self._parts["params"])
        self._programs: dict[str, Callable[[Tree], Tree]] = {}
        self._laid_out: dict[str, tuple[list[Any], Tree]] = {}

    def weights(self, policy: kljax.Policy) -> kljax.Policy:
        """Lays out the weights of a policy, in one compiled program; the last ones are kept until they change.

        With an adapter the base is laid out once: only the adapter changes from step to step.
        """
        if self.in_place:
            return policy
        adapter = None if policy.adapter is None else self._lay_out("adapter", policy.adapter)
        return kljax.Policy(self._lay_out("params", policy.params), adapter)

    def release(self) -> None:
        """Frees the weights that the update is about to change; a frozen base stays."""
        self._laid_out.pop("adapter" if "adapter" in self._laid_out else "params", None)

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Sets the mesh of the sampler's programs; a no-op if the weights stay in place."""
        return contextlib.nullcontext() if self.in_place else jax.set_mesh(self.mesh)

    def abstract_policy(self) -> kljax.Policy:
        """Describes the weights as they are laid out: shapes, dtypes and shardings."""
        return kljax.Policy(self._parts["params"], self._parts.get("adapter"))

    @property
    def bytes(self) -> int:
        """Bytes on a device of the weights that are laid out."""
        return sum(device_bytes(tree) for tree in self._parts.values())

    @property
    def row_parts(self) -> int:
        """Number of parts that the mesh splits rows into."""
        return axis_size("rows", self.mesh)

    def program(self, part: str) -> Callable[[Tree], Tree]:
        """Makes the jitted program that lays out "params" or "adapter"; it compiles on first use.

        Weights are rounded before they move, and move layer by layer: temporaries have the size of one layer, and no
        array is whole on a device unless the layout wants it whole.
        """
        if part not in self._programs:
            shardings = jax.tree.map(lambda x: x.sharding, self._parts[part])
            lay_out = traced_once(functools.partial(_move, self._stages(part), self._parts[part]), f"lay_out_{part}")
            self._programs[part] = jax.jit(lay_out, out_shardings=shardings)
        return self._programs[part]

    def _lay_out(self, part: str, tree: Tree) -> Tree:
        leaves = jax.tree.leaves(tree)
        if part in self._laid_out:
            known, result = self._laid_out[part]
            if len(known) == len(leaves) and all(a is b for a, b in zip(known, leaves, strict=True)):
                return result
            # Freed before the next ones are made: there are never two copies.
            del self._laid_out[part], result
        result = self.program(part)(tree)
        self._laid_out[part] = leaves, result
        return result

    def _stages(self, part: str) -> list[Tree]:
        """Makes the shardings that every leaf passes through between the update's and the sampler's, and the latter.

        Where tensor grows, a part of axis context moves to it first, whose devices hold the same weights, then a part
        of axis fsdp: an all-to-all. Without this step the partitioner of XLA may hold whole leaves on every device
        ("involuntary full rematerialization"). With axis expert the rest is gathered on these axes too, so that in the
        last step parts of equal size change their devices.
        """
        data, fsdp, expert, context, tensor = (self._training.shape[name] for name in AXES)
        growth = max(self.mesh.shape["tensor"] // tensor, 1)
        near = math.gcd(growth, context)
        split = math.gcd(growth // near, fsdp)
        devices = self._training.devices.reshape(data, fsdp // split, split, expert, context // near, near, tensor)
        names = ("data", "fsdp", "split", "expert", "context", "near", "tensor")
        mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
        describe = abstract_params if part == "params" else abstract_adapter

        def sharding_of(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            spec = (("split", "near", "tensor") if axis == "tensor" else axis for axis in leaf.sharding.spec)
            return NamedSharding(mesh, PartitionSpec(*spec))

        trees = [describe(self.model, self._training), *([self._parts[part]] if expert > 1 else [])]
        target = jax.tree.map(lambda leaf: leaf.sharding, self._parts[part])
        return [*(jax.tree.map(sharding_of, tree) for tree in trees), target]

    def _narrowed(self, params: Tree) -> Tree:
        """Gives weights that the decoder rounds to its dtype before use this dtype, if theirs is wider."""
        dtype = jnp.dtype(self.model.config.dtype)
        config = self.model.config
        wide = {"embed_tokens"} if config.tie_embeddings else {"lm_head"}

        def narrow(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            # Scales of norms and of int8 kernels are used in float32.
            rounded = path[-1].key in ("kernel", "bias", "embedding")
            if not rounded or leaf.dtype.itemsize <= dtype.itemsize or (self._wide_head and path[0].key in wide):
                return leaf
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

        return jax.tree_util.tree_map_with_path(narrow, params)


def _move(stages: Sequence[Tree], target: Tree, tree: Tree) -> Tree:
    """Rounds weights to the dtypes of `target` and moves them through shardings, the stacked layers one by one."""

    def move(leaf: jax.Array, like: jax.ShapeDtypeStruct, *through: NamedSharding, stacked: bool = False) -> jax.Array:
        for sharding in through:
            spec = PartitionSpec(*sharding.spec[1:]) if stacked else sharding.spec
            leaf = jax.lax.with_sharding_constraint(leaf.astype(like.dtype), NamedSharding(sharding.mesh, spec))
        return leaf

    def move_stacks(layers: Tree) -> Tree:
        """Moves the layers of all stacks; stacks of equal depth share a loop."""
        leaves, structure = jax.tree.flatten(layers)
        places: list[Any] = list(zip(*(jax.tree.leaves(part["layers"]) for part in (target, *stages)), strict=True))
        for depth in sorted({len(leaf) for leaf in leaves}):
            chosen = [number for number, leaf in enumerate(leaves) if len(leaf) == depth]

            def move_layer(layer: list[jax.Array], chosen: list[int] = chosen) -> list[jax.Array]:
                moved = zip(chosen, layer, strict=True)
                return [move(x, *places[number], stacked=True) for number, x in moved]

            for number, x in zip(chosen, jax.lax.map(move_layer, [leaves[n] for n in chosen]), strict=True):
                leaves[number] = x
        return jax.tree.unflatten(structure, leaves)

    parts = (tree, target, *stages)
    rest = {name: jax.tree.map(move, *(part[name] for part in parts)) for name in tree if name != "layers"}
    return rest | {"layers": move_stacks(tree["layers"])}


def _dtypes(tree: Tree) -> list[jnp.dtype]:
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]
