"""Compiles programs of the head with the compilers of accelerators, each in a process of an environment of its own.

The environment has libtpu and the CUDA plug-in of JAX. `compile_in` asks `Compiler`, which runs there: kljax, the naive
form and Tunix's chunks, for shapes alone.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kljax
from benchmarks.harness import environments
from benchmarks.harness.process import ROOT, start
from benchmarks.suites.head.jax_forms import Stats, TokenConstants, naive, of_kind, tiled, tunix_chunk
from kljax.log_probs._head import head_defaults
from train.plan.compiler import hlo
from train.plan.compiler.buffers import largest_buffers
from train.plan.compiler.collectives import collectives
from train.plan.compiler.lowering import DoesNotFitError, compile_program
from train.plan.compiler.topology import QUIET, parse_topology, topology_devices

DEFAULT = ROOT / ".venv-aot"
PACKAGES = {"tpu": "libtpu", "cuda": "jax-cuda12-pjrt"}
HOW = "make .venv-aot/.ready"
AXES = ("data", "fsdp", "tensor")
TOKENS = P(("data", "fsdp"))
HEAD = P("fsdp", "tensor")
# Accelerator, layout and program.
Key = tuple[str, str, str]


class Accelerator(NamedTuple):
    """A kind of accelerator, which need not be here, with the topologies of one chip and of 16.

    libtpu describes whole hosts only, whose first device stands for one chip. The clock of the matrix units at the
    published peak rate turns estimated cycles into seconds.
    """

    platform: str
    one: str
    many: str | None = None
    hertz: float | None = None


DEVICES = {
    "v5e": Accelerator("tpu", "v5e:2x2", "v5e:4x4", 1.5e9),
    "v5p": Accelerator("tpu", "v5p:2x2x1", "v5p:2x2x4", 1.75e9),
    "v6e": Accelerator("tpu", "v6e:2x2", "v6e:4x4", 1.75e9),
    "h100": Accelerator("cuda", "h100:1"),
    "h200": Accelerator("cuda", "h200:1"),
}


@dataclasses.dataclass(frozen=True)
class HeadSizes:
    """Tokens and sequences of a device, model width, vocabulary, and tokens of one chunk of Tunix's form."""

    tokens: int = 16_384
    rows: int = 16
    width: int = 4096
    vocab: int = 151_936
    chunk: int = 1024


FULL = HeadSizes()
# A smoke test with sizes that divide nothing.
QUICK = HeadSizes(tokens=512, rows=4, width=256, vocab=2200, chunk=128)


@dataclasses.dataclass(frozen=True)
class Order:
    """A program to compile, by a key of `DEVICES`, "one" or "sharded", and the name of a form.

    The effort of the compiler is from -1 to 1, where a low one takes more memory; None leaves the default, as for the
    tile.
    """

    device: str
    layout: str
    program: str
    tile: tuple[int, int] | None = None
    effort: float | None = None
    problem: HeadSizes = FULL

    def __str__(self) -> str:
        return " ".join(self.key) + ("" if self.tile is None else " {}x{}".format(*self.tile))

    @property
    def key(self) -> Key:
        """Returns device, layout and program."""
        return self.device, self.layout, self.program

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Order":
        """Reads an order from plain data, where a tile is a list."""
        known = {field.name: fields[field.name] for field in dataclasses.fields(cls)}
        tile = None if fields["tile"] is None else tuple(fields["tile"])
        return cls(**{**known, "tile": tile, "problem": HeadSizes(**fields["problem"])})


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """The plan of a compiler for one run on one device; nothing ran.

    Attributes:
      temp_bytes: temporary memory, without arguments and results; all that is known of a plan that does not fit.
      seconds: the compiler's estimate, see `hlo.estimated_cycles`; None where it makes none.
      collective_bytes: sum of the payloads over all executions.
      failed: the error where there is no plan, or None.
    """

    temp_bytes: int = 0
    fits: bool = True
    seconds: float | None = None
    collective_bytes: int = 0
    collective_executions: int = 0
    collectives: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    largest_buffers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    compile_seconds: float = 0.0
    failed: str | None = None


def installed(directory: pathlib.Path) -> dict[str, str]:
    """Returns the installed versions of JAX and the compilers in an environment."""
    packages = [str(path) for path in directory.glob("lib/python*/site-packages")]
    have = {package.name: package.version for package in metadata.distributions(path=packages)}
    return {name: have[name] for name in ("jax", "jaxlib", *PACKAGES.values()) if name in have}


def missing(directory: pathlib.Path, platform: str) -> str | None:
    """Explains why an environment cannot compile for a platform and how to change that, or returns None if it can."""
    have = installed(directory)
    package = PACKAGES[platform]
    if not have:
        return f"there is no environment at {directory}; `{HOW}` makes it"
    if package not in have:
        return f"{package} is not installed in {directory}; `{HOW}` installs it"
    return None


def compile_in(directory: pathlib.Path, order: Order) -> CompiledPlan:
    """Compiles an order in a process of an environment."""
    python = environments.interpreter(directory)
    with start("benchmarks.suites.compiler", python=python, settings=QUIET, quiet=True) as remote:
        remote.ask(do="load")
        return CompiledPlan(**remote.ask(do="plan", order=dataclasses.asdict(order)))


class Program(NamedTuple):
    """A function, with shapes, types and shardings of its arguments and shardings of its results."""

    run: Callable[..., tuple[jax.Array, ...]]
    arguments: tuple[Any, ...]
    out_shardings: tuple[NamedSharding, ...]

    def lower(self) -> jax.stages.Lowered:
        """Lowers the function for the arguments."""
        return jax.jit(self.run, out_shardings=self.out_shardings).lower(*self.arguments)


def mesh_of(name: str, layout: str) -> Mesh:
    """Returns a mesh of one device, or of 16 as `fsdp=4 x tensor=4`, with all axes of the trainer."""
    device = DEVICES[name]
    if layout == "one":
        return Mesh(np.array(topology_devices(parse_topology(device.one))[:1]).reshape(1, 1, 1), AXES)
    assert device.many is not None
    return Mesh(np.array(topology_devices(parse_topology(device.many))).reshape(1, 4, 4), AXES)


def build(name: str, mesh: Mesh, problem: HeadSizes, tile: kljax.Tile | None = None) -> Program:
    """Builds a program by name: loss with gradients to hidden states and head, unless the name ends in another kind."""
    contender, _, kind = name.partition("_")
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    # On one device it says which kind computes the head.
    sharding = kljax.HeadSharding(mesh=mesh, tokens=TOKENS, head=HEAD)
    tile = tile or head_defaults(mesh.devices.flat[0].device_kind).tile
    stats: dict[str, Callable[..., Stats]] = {
        "naive": naive,
        "kljax": functools.partial(tiled, sharding=sharding, tile=tile),
        "tunix": functools.partial(tunix_chunk, rows=problem.rows * devices, columns=problem.chunk // problem.rows),
    }
    tokens, head, replicated = (NamedSharding(mesh, spec) for spec in (TOKENS, HEAD, P()))
    others = {"forward": (replicated, tokens, tokens), "frozen": (replicated, tokens)}

    def per_token(dtype: Any, *width: int) -> Any:
        return jax.ShapeDtypeStruct((problem.tokens * devices, *width), dtype, sharding=tokens)

    hidden = per_token(jnp.bfloat16, problem.width)
    data = per_token(jnp.int32), per_token(jnp.float32), per_token(jnp.float32), per_token(jnp.bool), hidden
    weights = jax.ShapeDtypeStruct((problem.width, problem.vocab), jnp.bfloat16, sharding=head)
    arguments = hidden, weights, TokenConstants(*data)
    return Program(of_kind(stats[contender], kind), arguments, others.get(kind, (replicated, tokens, head)))


class Compiler:
    """Compiles programs in the process of an environment."""

    def plan(self, order: dict[str, Any]) -> dict[str, Any]:
        """Compiles an order, and returns the fields of its `CompiledPlan`."""
        return dataclasses.asdict(_plan(Order.from_json(order)))


def _plan(order: Order) -> CompiledPlan:
    """Reads the plan from the program and from its buffer assignment."""
    mesh = mesh_of(order.device, order.layout)
    tile = None if order.tile is None else kljax.Tile(*order.tile)
    try:
        compiled = compile_program(build(order.program, mesh, order.problem, tile).lower(), effort=order.effort)
    except DoesNotFitError as error:
        return CompiledPlan(temp_bytes=error.needed, fits=False)
    module = hlo.parse(compiled.text)
    hertz = DEVICES[order.device].hertz
    moved = collectives(module)
    return CompiledPlan(
        temp_bytes=compiled.temporary,
        seconds=None if hertz is None else hlo.estimated_cycles(module) / hertz,
        collective_bytes=round(sum(collective.total for collective in moved)),
        collective_executions=round(sum(collective.executions for collective in moved)),
        collectives=[dataclasses.asdict(collective) for collective in moved],
        largest_buffers=[buffer._asdict() for buffer in largest_buffers(compiled.assignment)],
        compile_seconds=round(compiled.seconds, 1),
    )


# The worker of `compile_in` calls it.
load = Compiler
