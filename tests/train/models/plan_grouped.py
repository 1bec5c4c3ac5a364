"""Plans of the compilers of TPUs and GPUs for the grouped product of a layer of Qwen3-30B-A3B.

`compile_in` asks `GroupedCompiler` in a process of an environment with the compilers.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.harness import environments
from benchmarks.harness.process import start
from train.models.grouped import choose_implementation, expected_trips, grouped_dot
from train.models.sharding import make_mesh
from train.plan.compiler import hlo
from train.plan.compiler.flops import count_flops
from train.plan.compiler.topology import QUIET, parse_topology, topology_devices

TOPOLOGIES = {"v5p": "v5p:2x2x1", "h100": "h100:1"}
ROWS, EXPERTS, INPUTS, OUTPUTS = 4096 * 8, 128, 2048, 1536
KERNELS = ("tpu_custom_call", "mosaic_gpu")
USEFUL = 2 * ROWS * INPUTS * OUTPUTS
"""Floating-point operations of one product of all rows."""


@dataclasses.dataclass(frozen=True)
class GroupedPlan:
    """The plan of a compiler for a product, or for both of its gradients.

    Attributes:
      implementation: the device's.
      flops: operations over the operations of one product; of a loop, with groups of equal size.
      temp_bytes: temporary memory, without arguments and results.
      kernels: whether a kernel of Pallas runs.
    """

    implementation: str
    flops: float
    temp_bytes: int
    kernels: bool


def compile_in(directory: pathlib.Path, device: str, kind: str, dtype: str) -> GroupedPlan:
    """Compiles the product ("forward") or its gradients ("gradient") of a type in a process of an environment."""
    python = environments.interpreter(directory)
    with start("tests.train.models.plan_grouped", python=python, settings=QUIET, quiet=True) as remote:
        remote.ask(do="load")
        return GroupedPlan(**remote.ask(do="plan", device=device, kind=kind, dtype=dtype))


class GroupedCompiler:
    """Compiles in the process of an environment."""

    def plan(self, device: str, kind: str, dtype: str) -> dict[str, Any]:
        """Returns the fields of a `GroupedPlan`."""
        mesh = make_mesh(devices=topology_devices(parse_topology(TOPOLOGIES[device]))[:1])

        def shape(*sizes: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P()))

        def gradient(x: jax.Array, weights: jax.Array, sizes: jax.Array, g: jax.Array) -> Any:
            return jax.vjp(lambda x, weights: grouped_dot(x, weights, sizes), x, weights)[1](g)

        arrays = shape(ROWS, INPUTS), shape(EXPERTS, INPUTS, OUTPUTS), shape(EXPERTS, dtype=jnp.int32)
        with jax.set_mesh(mesh):
            if kind == "forward":
                lowered = jax.jit(grouped_dot).lower(*arrays)
            else:
                lowered = jax.jit(gradient).lower(*arrays, shape(ROWS, OUTPUTS))
            compiled = lowered.compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        text = compiled.as_text() or ""
        plan = GroupedPlan(
            implementation=choose_implementation(mesh.devices.flat[0].device_kind, dtype),
            flops=count_flops(hlo.parse(text), expected_trips(ROWS, EXPERTS)) / USEFUL,
            temp_bytes=memory.temp_size_in_bytes,
            kernels=any(target in text for target in KERNELS),
        )
        return dataclasses.asdict(plan)


# The worker of `compile_in` calls it.
load = GroupedCompiler
