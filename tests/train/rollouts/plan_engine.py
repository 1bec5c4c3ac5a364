"""Compiles programs of the engine of turns for one device that is not here, and prints as JSON what copies the pool.

    python -m tests.train.rollouts.plan_engine v5e:1x1

It runs in the environment of `make test-aot`.
"""

import json
import os
import sys

from train.plan.compiler.topology import QUIET, Topology, parse_topology, topology_devices

os.environ.update(QUIET)

import jax

import kljax
from train.models import Decoder, DecoderConfig
from train.models.parameters import abstract_params
from train.models.sharding import make_mesh
from train.plan.compiler.lowering import LEAST_EFFORT, compile_program
from train.rollouts.engine import EngineSizes, ExtendSize
from train.rollouts.engine.programs import EnginePrograms
from train.rollouts.sampler import Sampling

# The columns of a row are no multiple of 128, and the heads are 128 wide: the compiler then lays keys out by heads.
SIZES = EngineSizes(64, 4096, 8, (16, 64), (4096,), (ExtendSize(64, 4, 32),))
SHAPE = DecoderConfig(
    vocab_size=1024, layers=1, width=256, heads=8, kv_heads=8, head_dim=128, mlp_width=256, dtype="bfloat16",
    attention="xla",
)  # fmt: skip


def plan(topology: Topology) -> dict[str, list[str]]:
    """Returns the lines of each program that copy an array of the size of keys or values of all rows."""
    mesh = make_mesh(devices=topology_devices(topology))
    programs = EnginePrograms(Decoder(SHAPE), SIZES, sampling=Sampling(), eos_ids=(), mesh=mesh)
    with jax.set_mesh(mesh):
        params = abstract_params(Decoder(SHAPE), mesh)
    weights, _ = programs.abstract_weights(kljax.Policy(params))
    pool = programs.abstract_pool()
    shapes = [f"[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(pool)]
    copies = {}
    for program in programs.lower(weights, pool):
        lines = compile_program(program.lowered, effort=LEAST_EFFORT).text.splitlines()
        copies[program.name] = [x for x in lines if " copy(" in x and any(shape in x for shape in shapes)]
    return copies


if __name__ == "__main__":
    print(json.dumps(plan(parse_topology(sys.argv[1]))))
