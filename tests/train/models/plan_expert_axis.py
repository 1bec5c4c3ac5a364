"""Plans of the compilers of TPUs and GPUs for the experts of a layer of Qwen3-30B-A3B over devices.

`compile_in` asks `ExpertCompiler` in a process of an environment with the compilers, which `make test-aot` makes.
`table` compares gathered with exchanged tokens for docs/moe.md.
"""

import dataclasses
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from benchmarks.harness import environments
from benchmarks.harness.process import start
from benchmarks.suites import compiler
from tests.train.models.plan_grouped import KERNELS
from train.models import dispatch
from train.models.config import DecoderConfig, ExpertsConfig, LayerKind
from train.models.dispatch import MOST_SENT, ROUNDS, ROW_BLOCKS, ChunkSizes
from train.models.experts import ExpertWeights
from train.models.layers import InitKey
from train.models.sharding import make_mesh, param_shardings, partition_spec
from train.plan.compiler import hlo
from train.plan.compiler.collectives import bytes_by_kind, collectives
from train.plan.compiler.flops import count_flops
from train.plan.compiler.lowering import LEAST_EFFORT
from train.plan.compiler.topology import QUIET, parse_topology, topology_devices
from train.plan.compiler.traffic import count_traffic

TOPOLOGIES = {
    "v5p": {8: "v5p:2x2x2", 16: "v5p:2x2x4", 64: "v5p:4x4x4"},
    "h100": {8: "h100:8", 16: "h100:2x8"},
}
"""By device and size of axis expert."""
TOKENS = 4096
"""Of a device."""
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
      traffic: bytes read from and written to the memory of a device.
    """

    temp_bytes: int
    collectives: dict[str, float]
    flops: float
    kernels: bool
    traffic: float


def compile_in(directory: pathlib.Path, device: str, ways: int, **options: Any) -> ExpertPlan:
    """Compiles the layer in a process of an environment; `options` are of `ExpertCompiler.plan`."""
    python = environments.interpreter(directory)
    with start("tests.train.models.plan_expert_axis", python=python, settings=QUIET, quiet=True) as remote:
        remote.ask(do="load")
        return ExpertPlan(**remote.ask(do="plan", device=device, ways=ways, **options))


class ExpertCompiler:
    """Compiles in the process of an environment."""

    def plan(self, device: str, ways: int, most_sent: float = MOST_SENT, effort: float | None = None) -> dict[str, Any]:
        """Returns the fields of an `ExpertPlan`; with a `most_sent` of 0 tokens are gathered."""
        dispatch.MOST_SENT = most_sent
        topology = parse_topology(TOPOLOGIES[device][ways])
        mesh = make_mesh(expert=ways, devices=topology_devices(topology))
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
            return jax.ShapeDtypeStruct((ways, TOKENS, width), dtype, sharding=sharding)

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
            options = {} if effort is None else {"exec_time_optimization_effort": effort}
            compiled = jax.jit(step).lower(weights, *arrays).compile(compiler_options=options)
        memory, text = compiled.memory_analysis(), compiled.as_text() or ""
        assert memory is not None
        sizes = ChunkSizes.of(TOKENS, active, ways=ways, row_bytes=2 * SHAPE.width)
        rows = sizes.tokens * active
        # Kernels count all rows of a block, of which so many are there.
        trips = {ROW_BLOCKS: rows / sizes.block_rows, ROUNDS: 1.0}
        module, products = hlo.parse(text), 3 * 2 * SHAPE.width * experts.width
        plan = ExpertPlan(
            temp_bytes=memory.temp_size_in_bytes,
            collectives={kind: size for kind, (_, size) in bytes_by_kind(collectives(module, trips)).items()},
            flops=count_flops(module, trips) / (products * sizes.chunks * rows),
            kernels=any(target in text for target in KERNELS),
            traffic=count_traffic(module, trips),
        )
        return dataclasses.asdict(plan)


# The worker of `compile_in` calls it.
load = ExpertCompiler


def table() -> str:
    """Returns the table of docs/moe.md, which `python -m tests.train.plan.table experts --write` writes."""
    lines = ["| ways | tokens are | temporaries | memory traffic | collectives |", "|--:|---|--:|--:|--:|"]
    for ways, (name, most_sent) in itertools.product((16, 64), {"gathered": 0, "exchanged": MOST_SENT}.items()):
        plan = compile_in(compiler.DEFAULT, "v5p", ways, most_sent=most_sent, effort=LEAST_EFFORT)
        moved = sum(plan.collectives.values()) / 1e9
        lines.append(
            f"| {ways} | {name} | {plan.temp_bytes / 2**20:,.0f} MiB | {plan.traffic / 1e9:.1f} GB | {moved:.1f} GB |"
        )
    return "\n".join(lines)
