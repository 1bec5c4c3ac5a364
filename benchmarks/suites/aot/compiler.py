"""Compiles programs with the compilers of accelerators, each in a process of an environment of its own.

The environment has libtpu and the CUDA plug-in of JAX; `compile_in` asks `Compiler`, which runs there.
"""

import dataclasses
import pathlib
from importlib import metadata
from typing import Any

import kljax
from benchmarks.harness import environments
from benchmarks.harness.process import ROOT, start
from benchmarks.suites.aot.plans import DEVICES, CompiledPlan, Order
from benchmarks.suites.aot.programs import build, mesh_of
from train.plan.compiler import hlo
from train.plan.compiler.buffers import largest_buffers
from train.plan.compiler.collectives import collectives
from train.plan.compiler.lowering import DoesNotFitError, compile_program
from train.plan.compiler.topology import QUIET

DEFAULT = ROOT / ".venv-aot"
PACKAGES = {"tpu": "libtpu", "cuda": "jax-cuda12-pjrt"}
HOW = "make .venv-aot/.ready"


def installed(directory: pathlib.Path) -> dict[str, str]:
    """Returns the installed versions of JAX and the compilers in an environment."""
    packages = [str(path) for path in directory.glob("lib/python*/site-packages")]
    have = {package.name: package.version for package in metadata.distributions(path=packages)}
    return {name: have[name] for name in ("jax", "jaxlib", *PACKAGES.values()) if name in have}


def missing(directory: pathlib.Path, platform: str) -> str | None:
    """Explains why an environment cannot compile for a platform and how to change that, or returns None if it can."""
    have, package = installed(directory), PACKAGES[platform]
    if not have:
        return f"there is no environment at {directory}; `{HOW}` makes it"
    if package not in have:
        return f"{package} is not installed in {directory}; `{HOW}` installs it"
    return None


def compile_in(directory: pathlib.Path, order: Order) -> CompiledPlan:
    """Compiles an order in a process of an environment."""
    python = environments.interpreter(directory)
    with start("benchmarks.suites.aot.compiler", python=python, settings=QUIET, quiet=True) as remote:
        remote.ask(do="load")
        return CompiledPlan(**remote.ask(do="plan", order=dataclasses.asdict(order)))


def plan(order: Order) -> CompiledPlan:
    """Compiles an order, and reads the plan from the program and from its buffer assignment."""
    mesh = mesh_of(order.device, order.layout)
    tile = None if order.tile is None else kljax.Tile(*order.tile)
    try:
        compiled = compile_program(build(order.program, mesh, order.problem, tile).lower(), effort=order.effort)
    except DoesNotFitError as error:
        return CompiledPlan(temp_bytes=error.needed, fits=False)
    if order.keep is not None:
        compiled.write(pathlib.Path(order.keep), str(order).replace(" ", "-"))
    module, hertz = hlo.parse(compiled.text), DEVICES[order.device].hertz
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


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiles programs in the process of an environment."""

    def plan(self, order: dict[str, Any]) -> dict[str, Any]:
        """Compiles an order, and returns the fields of the plan."""
        return dataclasses.asdict(plan(Order.from_json(order)))


# The worker of `compile_in` calls it.
load = Compiler
