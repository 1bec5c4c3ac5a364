"""Sampling from a mixture of experts on a mesh with axis expert: the tokens and the routes of one device."""

import functools
import math

import jax
import numpy as np
import pytest

import kljax
from tests import tiny
from tests.train.rollouts.census import weight_collectives
from tests.train.rollouts.test_layout import decode_program, largest_array
from train.context import RunContext
from train.distributed.compile_cache import compiled_anew
from train.models.parameters import abstract_params
from train.models.sharding import make_mesh
from train.plan.compiler import hlo
from train.rollouts.jax_source import JaxSource
from train.rollouts.sampler import Samples
from train.rollouts.source import Request
from train.sequences.token_fields import ROUTES

OPTIONS = (
    "model={layers: 2, width: 16, heads: 8, kv_heads: 8, head_dim: 4, mlp_width: 40}",
    "model.experts={count: 4, active: 2, width: 16}",
    "data.max_completion_length=4",
    "eval.batch_size=8",
    "warm_start.batch_size=8",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=2",
    "rollout.slots=8",
)


def context_on(*overrides: str, **mesh: int) -> RunContext:
    sizes = f"mesh={{{', '.join(f'{name}: {size}' for name, size in mesh.items())}}}"
    return tiny.context_of(tiny.config_of(*OPTIONS, sizes, *overrides), mesh=make_mesh(**mesh))


def policy_on(context: RunContext) -> kljax.Policy:
    """Weights large enough for opinions, the same on every mesh."""
    params = jax.device_get(tiny.drawn(context.model, jax.random.key(0)))
    params = jax.tree.map(lambda x: x * np.float32(4 if x.ndim > 2 else 1), params)
    return tiny.placed(kljax.Policy(params), context.model, context.mesh)


def sampled(context: RunContext) -> Samples:
    with jax.set_mesh(context.mesh):
        return JaxSource(context)._begin(Request.of(context, 0), policy_on(context))


@functools.cache
def on_one_device() -> Samples:
    return sampled(context_on())


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        ({"expert": 4, "tensor": 2}, ()),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ({"expert": 4, "tensor": 2}, ("rollout.mesh={data: 1, tensor: 2}",)),
                ({"fsdp": 2, "expert": 2, "tensor": 2}, ("rollout.mesh={data: 2, tensor: 2}",)),
            )
        ),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, ("rollout.mesh={data: 1, tensor: 4}",)),
    ],
    ids=str,
)
def test_tokens_and_routes_equal_one_device(mesh, overrides):
    """With the weights of the update, and with weights that move to a mesh of the sampler."""
    expected, context = on_one_device(), context_on(*overrides, **mesh)
    samples = sampled(context)
    assert context.layout.in_place == (not overrides)
    assert context.layout.mesh.shape["expert"] == mesh["expert"]
    np.testing.assert_array_equal(samples.tokens, expected.tokens)
    np.testing.assert_array_equal(samples.fields[ROUTES], expected.fields[ROUTES])


def on_own_mesh(tensor: int) -> RunContext:
    mesh = f"rollout.mesh={{data: {4 // tensor}, tensor: {tensor}}}"
    return context_on(mesh, "rollout.slots=null", fsdp=2, expert=2, tensor=2)


@pytest.mark.parametrize("tensor", [1, 4])
def test_experts_move_in_parts_and_stay_split(tensor):
    """No array is larger than a part of the destination, where axis expert splits nothing but experts."""
    context = on_own_mesh(tensor)
    params, layout = policy_on(context).params, context.layout
    with compiled_anew():
        compiled = layout.program("params").lower(abstract_params(context.model, context.mesh)).compile()
    result = compiled(params)
    parts = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(result)]
    assert largest_array(compiled.as_text()) == max(parts)
    jax.tree.map(np.testing.assert_array_equal, result, params)
    kernel = result["layers"]["mlp"]["experts"]["up_proj"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 2, 16, 16 // tensor)
    assert result["layers"]["self_attn"]["q_proj"]["kernel"].sharding.spec[1] is None


def test_no_decode_step_moves_an_expert():
    context = on_own_mesh(4)
    moved = weight_collectives(hlo.parse(decode_program(context)), context.model.structure().params, context.mesh)
    assert moved == []
