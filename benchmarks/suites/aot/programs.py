"""Programs of the head for shapes alone: kljax, the naive form and Tunix's chunks, on devices that are not here."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kljax
from benchmarks.suites.aot.plans import DEVICES, HeadSizes
from benchmarks.suites.head.jax_forms import Stats, TokenConstants, naive, of_kind, tiled, tunix_chunk
from kljax.log_probs._head import default_tile
from train.plan.compiler.topology import parse_topology, topology_devices

Array = jax.Array
AXES = ("data", "fsdp", "tensor")

TOKENS = P(("data", "fsdp"))
HEAD = P("fsdp", "tensor")


def mesh_of(name: str, layout: str) -> Mesh:
    """Returns a mesh of one device, or of 16 as `fsdp=4 x tensor=4`, with all axes of the trainer."""
    device = DEVICES[name]
    if layout == "one":
        return Mesh(np.array(topology_devices(parse_topology(device.one))[:1]).reshape(1, 1, 1), AXES)
    assert device.many is not None
    return Mesh(np.array(topology_devices(parse_topology(device.many))).reshape(1, 4, 4), AXES)


class Program(NamedTuple):
    """A function, with shapes, types and shardings of its arguments and shardings of its results."""

    run: Callable[..., tuple[Array, ...]]
    arguments: tuple[Any, ...]
    out_shardings: tuple[NamedSharding, ...]

    def lower(self) -> jax.stages.Lowered:
        """Lowers the function for the arguments."""
        return jax.jit(self.run, out_shardings=self.out_shardings).lower(*self.arguments)


def build(name: str, mesh: Mesh, problem: HeadSizes, tile: kljax.Tile | None = None) -> Program:
    """Builds a program by name: loss with gradients to hidden states and head, unless the name ends in another kind."""
    contender, _, kind = name.partition("_")
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    sharding = kljax.HeadSharding(mesh=mesh, tokens=TOKENS, head=HEAD) if mesh.size > 1 else None
    tile = tile or default_tile(mesh.devices.flat[0].device_kind)
    stats: dict[str, Callable[..., Stats]] = {
        "naive": naive,
        "kljax": functools.partial(tiled, sharding=sharding, tile=tile),
        "tunix": functools.partial(tunix_chunk, rows=problem.rows * devices, columns=problem.chunk // problem.rows),
    }
    tokens, head, replicated = (NamedSharding(mesh, spec) for spec in (TOKENS, HEAD, P()))
    outputs = {"forward": (replicated, tokens, tokens), "frozen": (replicated, tokens)}.get(
        kind, (replicated, tokens, head)
    )
    return Program(of_kind(stats[contender], kind), _arguments(problem, devices, tokens, head), outputs)


def _arguments(problem: HeadSizes, devices: int, tokens: NamedSharding, head: NamedSharding) -> tuple[Any, ...]:
    count = problem.tokens * devices

    def per_token(dtype: Any, *width: int) -> Any:
        return jax.ShapeDtypeStruct((count, *width), dtype, sharding=tokens)

    hidden = per_token(jnp.bfloat16, problem.width)
    data = TokenConstants(
        per_token(jnp.int32), per_token(jnp.float32), per_token(jnp.float32), per_token(jnp.bool), hidden
    )
    return hidden, jax.ShapeDtypeStruct((problem.width, problem.vocab), jnp.bfloat16, sharding=head), data
