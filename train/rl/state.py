"""The train state: one registered frozen dataclass, saved and restored as a whole, and kept finite."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

import kljax
from train.models.sharding import HOST

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardState:
    """The counts of the guard, from step to step.

    Attributes:
      skipped: updates skipped in a row, int32.
      nonfinite: index of the first trainable array whose gradient had no finite norm in the last of them, int32; -1:
        none.
      actions: times that a limit was answered with a roll-back or a lower learning rate, int32.
      rate: what the changes of the optimizer are multiplied by, float32.
    """

    skipped: jax.Array
    nonfinite: jax.Array
    actions: jax.Array
    rate: jax.Array

    @classmethod
    def initial(cls) -> "GuardState":
        """Returns the state before the first step."""
        # A donated state holds each array once.
        skipped, nonfinite, actions = (jnp.full((), number, jnp.int32) for number in (0, -1, 0))
        return cls(skipped, nonfinite, actions, jnp.ones((), jnp.float32))

    def after(self, applied: jax.Array, squares: Tree) -> "GuardState":
        """Returns the state after an update that was applied or skipped.

        Args:
          squares: sum of the squares of each gradient, with the structure of the trainable weights.
        """
        skipped = jnp.where(applied, 0, self.skipped + 1)
        first = _first(~jnp.isfinite(jnp.stack(jax.tree.leaves(squares))))
        return dataclasses.replace(self, skipped=skipped, nonfinite=jnp.where(applied, -1, first))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state between two RL steps.

    Attributes:
      step: RL steps done, int32.
      trainable: the weights that the optimizer updates: "params" or, with LoRA, "adapter"; and "value_head".
      opt_state: state of the optax optimizer.
      controllers: states of the controllers of the KL coefficients in use, by placement.
      reference: the part of a reference that follows the policy, with the structure of the same part of `trainable`;
        None if the reference is constant.
      guard: the counts of the guard.
      past: trainable weights of earlier steps, oldest first, for a lagged policy; else None.
    """

    step: jax.Array
    trainable: dict[str, Tree]
    opt_state: optax.OptState
    controllers: dict[str, kljax.ControllerState]
    guard: GuardState
    reference: Tree = None
    past: tuple[dict[str, Tree], ...] | None = None


def policy_part(trainable: dict[str, Tree]) -> str:
    """Returns the part of the policy that is trained, "adapter" or "params"."""
    return "adapter" if "adapter" in trainable else "params"


def policy_of(trainable: dict[str, Tree], base: Tree) -> kljax.Policy:
    """Returns the trained policy: its weights, or the shared base with its adapter."""
    if "adapter" in trainable:
        return kljax.Policy(base, trainable["adapter"])
    return kljax.Policy(trainable["params"], None)


def abstract_optimizer_state(
    optimizer: optax.GradientTransformation, trainable: Tree, replicated: NamedSharding, *, in_host: bool = False
) -> Tree:
    """Describes the state of an optimizer by shapes, dtypes and shardings.

    A moment is split as the weight at the end of its path, if that has its shape; everything else is replicated.

    Args:
      optimizer: makes the state.
      trainable: the weights, or their shapes, dtypes and shardings.
      replicated: sharding over all devices of the weights.
      in_host: whether moments lie in the memory of the host; scalars stay on the devices.
    """
    weights = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(trainable)[0]}

    def describe(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        ends = (weights.get(jax.tree_util.keystr(path[start:])) for start in range(len(path)))
        weight = next((weight for weight in ends if weight is not None and weight.shape == leaf.shape), None)
        sharding = replicated if weight is None else weight.sharding
        if in_host and leaf.ndim:
            sharding = sharding.with_memory_kind(HOST)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(describe, jax.eval_shape(optimizer.init, trainable))


def init_optimizer_state(
    optimizer: optax.GradientTransformation, trainable: Tree, replicated: NamedSharding, *, in_host: bool = False
) -> optax.OptState:
    """Makes the state of `abstract_optimizer_state` in one compiled program, so that no moment is ever whole."""
    state = abstract_optimizer_state(optimizer, trainable, replicated, in_host=in_host)
    return jax.jit(optimizer.init, out_shardings=jax.tree.map(lambda x: x.sharding, state))(trainable)


def initial_state(
    trainable: dict[str, Tree],
    optimizer: optax.GradientTransformation,
    controllers: Mapping[str, kljax.Controller],
    replicated: NamedSharding,
    *,
    in_host: bool = False,
) -> TrainState:
    """Makes the state before the first RL step. Moments are sharded as their weights, scalars are replicated.

    Args:
      trainable: the weights.
      optimizer: makes its state.
      controllers: of the KL coefficients.
      replicated: sharding of scalars.
      in_host: whether moments lie in the memory of the host.
    """
    opt_state = init_optimizer_state(optimizer, trainable, replicated, in_host=in_host)
    states = {name: controller.init() for name, controller in controllers.items()}
    step, states, guard = jax.device_put((jnp.zeros((), jnp.int32), states, GuardState.initial()), replicated)
    return TrainState(step, trainable, opt_state, states, guard)


def first_nonfinite(tree: Tree) -> jax.Array:
    """Returns the index of the first leaf that holds a number that is not finite; -1 if there is none."""
    return _first(jnp.stack([~jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))


_find_nonfinite = jax.jit(first_nonfinite)


def nonfinite_name(arrays: Mapping[str, jax.Array]) -> str | None:
    """Returns the first name, in the order of the mapping, whose array is not finite; None if all are."""
    index = int(_find_nonfinite(list(arrays.values()))) if arrays else -1
    return None if index < 0 else list(arrays)[index]


def _first(wrong: jax.Array) -> jax.Array:
    return jnp.where(wrong.any(), jnp.argmax(wrong), -1)


def keep_unless(applied: jax.Array, new: Tree, old: Tree) -> Tree:
    """Returns `new` where `applied` is true, else `old`.

    `applied` comes from gradient and metrics and not from `new`, so that `new` can take the memory of a donated `old`.
    """
    return jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)
