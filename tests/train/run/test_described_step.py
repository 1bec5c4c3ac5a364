"""The shapes that a step is planned with are those of the step: each program gets what it was described with."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import pytest

import kljax
from tests import tiny
from train.plan.abstract import abstract_reference, abstract_state
from train.references.follow import start_following
from train.rl.policy import ScoredPolicy
from train.rl.reference import FrozenWeights
from train.rollouts.describe import describe_batch
from train.run.loop import rl_step
from train.run.programs import Programs, describe_step
from train.run.setup import first_state

KL = "kl.loss.coef=0.1"
CASES: dict[str, tuple[str, ...]] = {
    "one update": ("optim.updates_per_batch=1",),
    "unfinished": (KL, "loss.unfinished=drop", "optim.updates_per_batch=2"),
    "exact": ("kl.loss={coef: 0.1, estimator: exact}", "kl.reward={coef: 0.1, estimator: exact}"),
    "average": (KL, "reference={source: ema, decay: 0.9}", "advantage.type=gae", "loss.value_coef=0.5"),
    "lagged": ("rollout.policy_lag=1", "correction=[{type: max_lag, max_lag: 1}]"),
    "random numbers": ("loss.type=clip_cov",),
    "kept tokens": ("rollout.top_k=4", "lora.rank=2", KL),
}


def shape_of(x: Any) -> Any:
    """Describes an array; one that no program placed may go where it is needed."""
    placed = isinstance(x, jax.Array) and x.committed
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if placed else None)


def present(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None}


def assert_alike(name: str, real: Any, described: Any) -> None:
    leaves, others = (jax.tree_util.tree_leaves_with_path(tree) for tree in (real, described))
    assert [jax.tree_util.keystr(path) for path, _ in leaves] == [jax.tree_util.keystr(path) for path, _ in others]
    for (path, leaf), (_, other) in zip(leaves, others, strict=True):
        where = f"{name}{jax.tree_util.keystr(path)}"
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype), where
        if leaf.sharding is not None and other.sharding is not None:
            assert leaf.sharding.is_equivalent_to(other.sharding, len(leaf.shape)), where


@pytest.mark.parametrize("case", CASES)
def test_programs_get_what_they_were_described_with(case: str) -> None:
    config = tiny.config_of(*CASES[case])
    mesh = tiny.mesh_of(2)
    context = tiny.context_of(config, mesh=mesh)
    plan, model = context.plan, context.model
    given: dict[str, Any] = {}

    def noting(name: str, program: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **keywords: Any) -> Any:
            given[name] = jax.tree.map(shape_of, (arguments, present(keywords)))
            return program(*arguments, **keywords)

        return called

    with jax.set_mesh(mesh):
        shapes, base = abstract_state(plan, model, context.optimizer, mesh)
        reference = abstract_reference(plan, model, mesh, shapes)
        weights = FrozenWeights(base, reference)
        calls = describe_step(context, Programs.of(context, shapes), shapes, weights, describe_batch(context))
        described = {call.name: (call.arguments, present(call.keywords)) for call in calls}
        params = tiny.placed(kljax.Policy(tiny.host_params()), model, mesh).params
        state = first_state(plan, model, mesh, tiny.copied(params), context.optimizer)
        loaded = None if reference is None else ScoredPolicy(model, kljax.Policy(params if base is None else None))
        if loaded is not None and config.reference.source == "ema":
            state = dataclasses.replace(state, reference=start_following(config, loaded, state.trainable))
        frozen = FrozenWeights(None if base is None else params, loaded)
        programs = Programs.of(context, state)
        noted = {name: noting(name, getattr(programs, name)) for name in ("score", "prepare", "update")}
        rl_step(context, dataclasses.replace(programs, **noted), tiny.stream_of(context), frozen, state, step=0)
    assert given.keys() == described.keys()
    for name, arguments in given.items():
        assert_alike(name, arguments, described[name])
