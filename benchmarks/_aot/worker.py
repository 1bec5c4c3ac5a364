"""Compiles one program for one kind of device and prints what its compiler planned, as JSON on the last line.

`environment.compile_in` starts it, in an environment with the compilers and with the variables that they need.
"""

import pathlib
import re
import sys
import time

import jax

import kljax
from benchmarks._aot import buffers, cost, hlo
from benchmarks._aot.devices import DEVICES, mesh_of
from benchmarks._aot.order import Order, Plan
from benchmarks._aot.programs import build

# The two ways in which the TPU's compiler says that there is no room, with what the temporaries or all would take.
_TOO_LARGE = re.compile(r"(?:temporaries \(|Used )([\d.]+)([KMGT])\)? (?:exceeds|of)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def too_large(message: str) -> Plan | None:
    """The plan that did not fit, from the error of the compiler; None if it is another error."""
    found = _TOO_LARGE.search(message)
    return Plan(temp_bytes=round(float(found[1]) * _UNITS[found[2]]), fits=False) if found else None


def text_of(compiled: jax.stages.Compiled, dump: pathlib.Path) -> str:
    """The compiled program; from the dump where the compiler fails to print it."""
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        printed = _largest(dump, "*after_codegen.txt")
        if not printed:
            raise
        return printed


def _largest(dump: pathlib.Path, pattern: str) -> str:
    """The text of the largest file, which is that of the program; the others are of constants that JAX compiles."""
    found = sorted(dump.glob(pattern), key=lambda path: path.stat().st_size)
    return found[-1].read_text() if found else ""


def plan(order: Order, dump: pathlib.Path) -> Plan:
    """Compiles, and reads the compiler's plan from the program and from what it left in `dump`."""
    mesh = mesh_of(order.device, order.layout)
    tile = None if order.tile is None else kljax.Tile(*order.tile)
    lowered = build(order.program, mesh, order.problem, tile).lower()
    # JAX 0.12 does not know the option any more.
    known = order.effort is not None and jax.__version_info__ < (0, 12)
    options = {"exec_time_optimization_effort": order.effort} if known else {}
    start = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=options)  # type: ignore[arg-type]
    except jax.errors.JaxRuntimeError as error:
        refused = too_large(str(error))
        if refused is None:
            raise
        return refused
    seconds = time.perf_counter() - start
    text, assignment = text_of(compiled, dump), _largest(dump, "*-buffer-assignment.txt")
    if order.keep is not None:
        name = str(order).replace(" ", "-")
        pathlib.Path(order.keep, f"{name}.hlo.txt").write_text(text)
        pathlib.Path(order.keep, f"{name}.buffers.txt").write_text(assignment)
    memory = compiled.memory_analysis()
    assert memory is not None
    return _read(text, assignment, memory.temp_size_in_bytes, DEVICES[order.device].hertz, seconds)


def _read(text: str, assignment: str, temp_bytes: int, hertz: float | None, compile_seconds: float) -> Plan:
    module = hlo.parse(text)
    moved = cost.collectives(module)
    return Plan(
        temp_bytes=temp_bytes,
        seconds=None if hertz is None else cost.estimated_cycles(module) / hertz,
        collective_bytes=sum(one.total for one in moved),
        collective_executions=sum(one.executions for one in moved),
        collectives=[one._asdict() for one in moved],
        largest_buffers=[one._asdict() for one in buffers.largest(assignment)],
        compile_seconds=round(compile_seconds, 1),
    )


def main() -> None:
    """Reads the order, prints the plan."""
    order, dump = sys.argv[1:]
    print(plan(Order.from_json(order), pathlib.Path(dump)).to_json())


if __name__ == "__main__":
    main()
