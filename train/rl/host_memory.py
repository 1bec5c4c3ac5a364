"""The optimizer's state in the memory of the host: the update brings the moments of one layer at a time to the devices.

Values equal the results of the same optimizer with its state on the devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import DictKey

from train.config.optim import Optim
from train.models.sharding import HOST
from train.rl.optimizer import make_optimizer

Tree = Any


def make_run_optimizer(section: Optim) -> optax.GradientTransformation:
    """Makes the optimizer of RL, with its state in the memory that the config names."""
    return make_optimizer(section, host_memory if section.host_memory else None)


def host_memory(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Makes an elementwise optimizer whose state lies in the memory of the host.

    Its `update` has a keyword `finite`, a bool: where it is false, the state stays as it is. The stacked layers go
    through the devices one after the other, in place, everything else at once.

    Args:
      optimizer: computes every entry of a change from the same entries of gradient, weight and state.
    """

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *, finite: jax.Array, **_: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        def advance(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            on_device = _moved(state, jax.memory.Space.Device)
            changes, new = optimizer.update(grads, on_device, params)
            selected = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, on_device)
            return changes, _moved(selected, jax.memory.Space.Host)

        shared = _part(state, "shared")
        rest = advance(_part(grads, "rest"), _joined(shared, _part(state, "rest")), _part(params, "rest"))
        # Stacks of equal depth share a loop.
        for depth in sorted({x.shape[0] for x in jax.tree.leaves(_part(grads, "layers"))}):
            stacked = _part(grads, "layers", depth), _moved(_part(state, "layers", depth), jax.memory.Space.Host)
            weights = _part(params, "layers", depth)

            def advance_layer(index: jax.Array, carry: tuple[Tree, Tree], weights: Tree = weights) -> tuple[Tree, Tree]:
                # A change takes the place of its gradient.
                layer, moments, weight = (_take(tree, index) for tree in (*carry, weights))
                changes, new = advance(layer, _joined(shared, moments), weight)
                return _put(carry[0], changes, index), _put(carry[1], _part(new, "layers"), index)

            stacked = lax.fori_loop(0, depth, advance_layer, stacked)
            rest = _joined(rest[0], stacked[0]), _joined(rest[1], stacked[1])
        return rest

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def has_host_memory(device: jax.Device) -> bool:
    """Tells whether programs of a device use memory of the host; False for a GPU that is only compiled for."""
    try:
        return HOST in {memory.kind for memory in device.addressable_memories()}
    except jax.errors.JaxRuntimeError:
        return False


def _kind(path: tuple[Any, ...]) -> str:
    """Sorts a leaf: stacked layers, the rest of the weights, or a count that all weights share."""
    names = {entry.key for entry in path if isinstance(entry, DictKey)}
    return "shared" if not names else "layers" if "layers" in names else "rest"


def _part(tree: Tree, kind: str, depth: int | None = None) -> Tree:
    """Puts None in place of all leaves of another kind, or of stacks of another depth."""

    def select(path: tuple[Any, ...], x: jax.Array) -> jax.Array | None:
        return x if _kind(path) == kind and depth in (None, *x.shape[:1]) else None

    return jax.tree_util.tree_map_with_path(select, tree)


def _joined(left: Tree, right: Tree) -> Tree:
    return jax.tree.map(lambda a, b: b if a is None else a, left, right, is_leaf=lambda x: x is None)


def _moved(state: Tree, space: Any) -> Tree:
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, state)


def _take(tree: Tree, index: jax.Array) -> Tree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def _put(tree: Tree, values: Tree, index: jax.Array) -> Tree:
    return jax.tree.map(lambda x, value: lax.dynamic_update_index_in_dim(x, value, index, 0), tree, values)
