"""The train state: one registered frozen dataclass, saved and restored as a whole."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import kljax

Tree = Any


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
      past: trainable weights of earlier steps, oldest first, for a lagged policy; else None.
    """

    step: jax.Array
    trainable: dict[str, Tree]
    opt_state: optax.OptState
    controllers: dict[str, kljax.ControllerState]
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


def initial_state(
    trainable: dict[str, Tree],
    optimizer: optax.GradientTransformation,
    controllers: Mapping[str, kljax.Controller],
    replicated: Any,
) -> TrainState:
    """Makes the state before the first RL step. Moments are sharded as their weights, scalars are replicated."""
    opt_state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, replicated), optimizer.init(trainable))
    states = {name: controller.init() for name, controller in controllers.items()}
    step, states = jax.device_put((jnp.zeros((), jnp.int32), states), replicated)
    return TrainState(step, trainable, opt_state, states)
