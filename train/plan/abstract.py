"""The state of a run as shapes, types and shardings: all that a compiler needs, and no memory."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import kljax
from train.config.errors import field_errors
from train.config.plan import Plan
from train.context import RunContext
from train.models import Decoder
from train.models.parameters import abstract_adapter, abstract_params, abstract_value_head
from train.models.sharding import replicated, with_sharding
from train.references.find import PARTS, find_reference
from train.references.follow import scored_part, with_abstract_reference
from train.rl.algorithms import make_controllers
from train.rl.policy import ScoredPolicy
from train.rl.state import GuardState, TrainState, abstract_optimizer_state
from train.rollouts.engine import TurnEngine
from train.rollouts.engine.of_run import engine_of_run
from train.rollouts.engine.programs import LoweredEngineProgram

Tree = Any


@dataclasses.dataclass(frozen=True)
class AbstractEngine:
    """The engine of episodes without memory.

    Attributes:
      engine: whose programs are not compiled.
      weights: the layers of the policy, apart from each other, as the programs take them.
      pool: the rows of the KV cache.
      unstack: the program that makes the weights, lowered.
    """

    engine: TurnEngine
    weights: Tree
    pool: Tree
    unstack: Any

    @classmethod
    def of(cls, context: RunContext, policy: kljax.Policy) -> "AbstractEngine | None":
        """Describes the engine of a run for a described policy; None if its rollouts have no engine."""
        engine = engine_of_run(context)
        if engine is None:
            return None
        weights, unstack = engine.programs.abstract_weights(policy)
        return cls(engine, weights, engine.programs.abstract_pool(), unstack)

    def lower(self) -> Iterator[LoweredEngineProgram]:
        """Lowers all programs of the engine."""
        return self.engine.programs.lower(self.weights, self.pool)


def abstract_state(
    plan: Plan, model: Decoder, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[TrainState, Tree]:
    """Describes the state before RL, with a reference that follows the policy, and the frozen base under an adapter."""
    config = plan.config
    params = abstract_params(model, mesh)
    trainable: dict[str, Tree] = (
        {"params": params} if config.lora is None else {"adapter": abstract_adapter(model, mesh)}
    )
    if plan.value_head:
        trainable["value_head"] = abstract_value_head(model, mesh)
    everywhere = replicated(mesh)
    controllers = {
        name: with_sharding(jax.eval_shape(controller.init), everywhere)
        for name, controller in make_controllers(plan).items()
    }
    guard, step = jax.eval_shape(lambda: (GuardState.initial(), jnp.zeros((), jnp.int32)))
    state = TrainState(
        step=with_sharding(step, everywhere),
        trainable=trainable,
        opt_state=abstract_optimizer_state(optimizer, trainable, everywhere, in_host=config.optim.host_memory),
        controllers=controllers,
        guard=with_sharding(guard, everywhere),
        past=tuple(_copy(trainable) for _ in range(config.rollout.policy_lag)) or None,
    )
    return with_abstract_reference(plan, state), None if config.lora is None else params


def _copy(trainable: dict[str, Tree]) -> dict[str, Tree]:
    """Describes a copy of the weights that sampling needs; equal descriptions stand for arrays of their own."""
    weights = {name: tree for name, tree in trainable.items() if name != "value_head"}
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights)


def abstract_reference(plan: Plan, model: Decoder, mesh: Mesh, state: TrainState) -> ScoredPolicy | None:
    """Describes the reference at this state, without weights that it shares with the policy; None if no term uses it.

    Raises:
      UserError: the reference is missing, or does not fit.
    """
    config = plan.config
    section = plan.config.reference
    if not plan.reference:
        return None
    if section.source in PARTS:
        with field_errors("reference.path"):
            reference_model = find_reference(config, model).model
        if section.source == "checkpoint":
            return ScoredPolicy(reference_model, kljax.Policy(abstract_params(reference_model, mesh)))
        return ScoredPolicy(reference_model, kljax.Policy(None, abstract_adapter(reference_model, mesh)))
    weights = abstract_params(model, mesh) if config.lora is None else abstract_adapter(model, mesh)
    if state.reference is not None:
        # Averages are stored in float32, and cast to the dtypes of the policy before they are scored.
        weights = jax.tree.map(
            lambda x, like: x if x.dtype == like.dtype else like, scored_part(state.reference), weights
        )
    if config.lora is None:
        return ScoredPolicy(model, kljax.Policy(weights))
    without = section.source == "base" and state.reference is None
    return ScoredPolicy(model, kljax.Policy(None, None if without else weights))
