"""Compiles the programs of a small sampler for devices that are not here, and prints what they plan as JSON.

    python -m tests.train.rollouts.plan_sampler v5p:4x4x4

It runs in the environment of `make test-aot`.
"""

import dataclasses
import json
import os
import sys
from typing import Any, cast

from train.plan.compiler.topology import QUIET, Topology, parse_topology, topology_devices

os.environ.update(QUIET)

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import kljax
from tests.train.rollouts.census import weight_collectives
from train.config.load import parse
from train.context import RunContext, make_bare_context
from train.data.tokenizers import ByteTokenizer
from train.models import Decoder, DecoderConfig
from train.models.parameters import abstract_params
from train.models.sharding import batch_sharding, device_bytes, make_mesh
from train.plan.compiler import hlo
from train.plan.compiler.lowering import LEAST_EFFORT, CompiledProgram, compile_program
from train.rollouts.jax_source import sampling_program
from train.rollouts.sampler import Sampling

# Attention of the prefill by XLA: cuDNN is not installed where these programs are compiled.
SHAPE = DecoderConfig(
    vocab_size=1024, layers=4, width=256, heads=8, kv_heads=4, head_dim=32, mlp_width=640, dtype="bfloat16",
    attention="xla",
)  # fmt: skip
# No number of rows is a size of a weight.
PROMPTS, SAMPLES, LENGTH = 48, 2, 12
RAW = {
    "steps": 1,
    "data": {"max_prompt_length": LENGTH, "max_completion_length": 20},
    "model": {"heads": 8, "kv_heads": 4, "dtype": "bfloat16"},
    "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "slots": PROMPTS},
    "eval": {"batch_size": PROMPTS},
    "warm_start": {"steps": 0},
}
MESHES = {64: {"fsdp": 16, "tensor": 4}, 8: {"fsdp": 8, "tensor": 1}}
"""The mesh of the update by the number of devices."""


def context_on(mesh: Mesh, rollout: dict[str, Any]) -> RunContext:
    """A context without task and prompts, which no program reads."""
    section = {**cast(dict[str, Any], RAW["rollout"]), **rollout}
    config = parse({**RAW, "mesh": dict(mesh.shape), "rollout": section})[0]
    return make_bare_context(config, Decoder(SHAPE), mesh, ByteTokenizer())


def compile_sampler(context: RunContext, weights: Any) -> CompiledProgram:
    """Compiles the program that samples with weights of these shapes and shardings."""
    layout = context.layout
    program = sampling_program(context, "sample", SAMPLES, sampling=Sampling(), stop=None)
    with jax.set_mesh(layout.mesh):
        tokens = jax.ShapeDtypeStruct((PROMPTS, LENGTH), jnp.int32, sharding=batch_sharding(layout.mesh))
        mask = jax.ShapeDtypeStruct(tokens.shape, jnp.bool, sharding=tokens.sharding)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return compile_program(program.lower(kljax.Policy(weights), tokens, mask, key), effort=LEAST_EFFORT)


def plan(topology: Topology) -> dict[str, Any]:
    """Plans sampling with weights in place and laid out, and the program that lays them out."""
    mesh = make_mesh(**MESHES[topology.size], devices=topology_devices(topology))
    in_place, laid_out = (context_on(mesh, rollout) for rollout in ({"in_place": True}, {}))
    params = abstract_params(Decoder(SHAPE), mesh)
    layout = laid_out.layout
    with jax.set_mesh(mesh):
        moved = compile_program(layout.program("params").lower(params), effort=LEAST_EFFORT)
    target = layout.abstract_policy().params
    largest = max(device_bytes(leaf) for leaf in jax.tree.leaves(target))

    def gathered(context: RunContext, weights: Any) -> list[str]:
        return weight_collectives(hlo.parse(compile_sampler(context, weights).text), params, mesh)

    return {
        "line": layout.line,
        "mesh": dict(layout.mesh.shape),
        "in place": gathered(in_place, params),
        "laid out": gathered(laid_out, target),
        "layout": {name: value for name, value in dataclasses.asdict(moved).items() if isinstance(value, int)},
        "largest": largest,
    }


if __name__ == "__main__":
    print(json.dumps(plan(parse_topology(sys.argv[1]))))
