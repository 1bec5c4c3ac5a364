"""Plans of the compilers of TPUs and GPUs for the experts of a layer of Qwen3-30B-A3B over eight devices.

`compile_in` asks `ExpertCompiler` in a process of an environment with the compilers.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from benchmarks.harness import environments
from benchmarks.harness.process import start
from train.models.config import DecoderConfig, ExpertsConfig, LayerKind
from train.models.dispatch import ROW_BLOCKS, chunk_sizes
from train.models.experts import ExpertWeights
from train.models.grouped import expected_trips
from train.models.layers import InitKey
from train.models.sharding import make_mesh, param_shardings, partition_spec
from train.plan.compiler import hlo
from train.plan.compiler.collectives import bytes_by_kind, collectives
from train.plan.compiler.flops import count_flops
from train.plan.compiler.topology import QUIET, parse_topology, topology_devices

TOPOLOGIES = {"v5p": "v5p:2x2x2", "h100": "h100:8"}
TOKENS, WAYS = 4096, 8
"""Tokens of a device, and devices of axis expert."""
SHAPE = DecoderConfig(
    vocab_size=64, layers=1, width=2048, heads=32, kv_heads=4, head_dim=128, mlp_width=6144,
    pattern=(LayerKind(mlp="experts"),), experts=ExpertsConfig(count=128, active=8, width=768), dtype="bfloat16",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ExpertPlan:
    """The plan of a compiler for the experts of a layer and their gradients, computed again in the backward pass.

    Attributes:
      temp_bytes: temporary memory, without arguments and results.
      collectives: bytes by kind, of all executions.
      flops: operations over the operations of the three products of all rows.
      kernels: whether a kernel of Pallas runs.
    """

    temp_bytes: int
    collectives: dict[str, float]
    flops: float
    kernels: bool


def compile_in(directory: pathlib.Path, device: str) -> ExpertPlan:
    """Compiles the layer in a process of an environment."""
    python = environments.interpreter(directory)
    with start("tests.train.models.plan_expert_axis", python=python, settings=QUIET, quiet=True) as remote:
        remote.ask(do="load")
        return ExpertPlan(**remote.ask(do="plan", device=device))


class ExpertCompiler:
    """Compiles in the process of an environment."""

    def plan(self, device: str) -> dict[str, Any]:
        """Returns the fields of an `ExpertPlan`."""
        topology = parse_topology(TOPOLOGIES[device])
        mesh = make_mesh(expert=WAYS, devices=topology_devices(topology))
        experts = SHAPE.experts
        assert experts is not None
        graph, state = nnx.split(nnx.eval_shape(lambda: ExpertWeights(SHAPE, InitKey(jax.random.key(0)))))
        axes, shapes = (nnx.to_pure_dict(tree) for tree in (nnx.get_partition_spec(state), state))
        weights = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            param_shardings(mesh, axes, shapes),
        )

        def array(width: int, dtype: Any) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, partition_spec(("rows", None, None)))
            return jax.ShapeDtypeStruct((WAYS, TOKENS, width), dtype, sharding=sharding)

        def step(weights: Any, x: jax.Array, gates: jax.Array, routes: jax.Array, g: jax.Array) -> Any:
            def layer(weights: Any, x: jax.Array, gates: jax.Array) -> jax.Array:
                return nnx.merge(graph, nnx.State(weights))(x, routes, gates)

            y, pull = jax.vjp(jax.checkpoint(layer), weights, x, gates)
            return y, pull(g)

        narrow, active = jnp.bfloat16, experts.active
        arrays = (
            array(SHAPE.width, narrow),
            array(active, narrow),
            array(active, jnp.int32),
            array(SHAPE.width, narrow),
        )
        with jax.set_mesh(mesh):
            compiled = jax.jit(step).lower(weights, *arrays).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text() or ""
        assert memory is not None
        chunks, chunk, block_rows = chunk_sizes(TOKENS, active, ways=WAYS, row_bytes=2 * SHAPE.width)
        module, trips = hlo.parse(text), {ROW_BLOCKS: 1.0} | expected_trips(chunk * active, experts.count // WAYS)
        products = 3 * 2 * SHAPE.width * experts.width
        if device == "h100":
            flops = count_flops(module, trips) / (products * chunks * chunk * active)
        else:  # Kernels tell the compiler what all rows of a block cost.
            flops = (compiled.cost_analysis() or {})["flops"] / (products * block_rows)
        plan = ExpertPlan(
            temp_bytes=memory.temp_size_in_bytes,
            collectives={kind: size for kind, (_, size) in bytes_by_kind(collectives(module, trips)).items()},
            flops=flops,
            kernels="tpu_custom_call" in text,
        )
        return dataclasses.asdict(plan)


# The worker of `compile_in` calls it.
load = ExpertCompiler
