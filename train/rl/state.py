"""What changes during a run: one registered frozen dataclass, saved and restored whole."""

import dataclasses
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
      trainable: what the optimizer updates: "params" or, with LoRA, "adapter"; and "value_head" if there is one.
      opt_state: state of the optax optimizer.
      controller: state of the KL controller of the reward.
      reference: what of a reference that follows the policy has moved, laid out as the same part of `trainable`; None
        where the reference stays what it is.
      past: what was trainable at the steps before, oldest first, where sampling lags behind; else None.
    """

    step: jax.Array
    trainable: dict[str, Tree]
    opt_state: optax.OptState
    controller: kljax.ControllerState
    reference: Tree = None
    past: tuple[dict[str, Tree], ...] | None = None


def policy_part(trainable: dict[str, Tree]) -> str:
    """Which half of the policy is trained, and so which half a reference that follows it has of its own."""
    return "adapter" if "adapter" in trainable else "params"


def policy_of(trainable: dict[str, Tree], base: Tree) -> kljax.Policy:
    """The policy being trained: its own weights, or the base that it shares with the reference plus its adapter."""
    if "adapter" in trainable:
        return kljax.Policy(base, trainable["adapter"])
    return kljax.Policy(trainable["params"], None)


def initial_state(
    trainable: dict[str, Tree], optimizer: optax.GradientTransformation, controller: kljax.Controller, replicated: Any
) -> TrainState:
    """The state before the first RL step. Moments are laid out as their weights, scalars are on every device."""
    opt_state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, replicated), optimizer.init(trainable))
    step, controller_state = jax.device_put((jnp.zeros((), jnp.int32), controller.init()), replicated)
    return TrainState(step, trainable, opt_state, controller_state)
