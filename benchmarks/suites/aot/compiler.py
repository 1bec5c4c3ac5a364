"""Compiles programs with the compilers of accelerators, each in a process of an environment of its own.

The environment has libtpu and the CUDA plug-in of JAX; `compile_in` asks `Compiler`, which runs there.
"""

import dataclasses
import pathlib
import re
import tempfile
import time
from importlib import metadata
from typing import Any

import jax

import kljax
from benchmarks.harness import environments
from benchmarks.harness.process import ROOT, start
from benchmarks.suites.aot import hlo
from benchmarks.suites.aot.plans import DEVICES, Order, Plan
from benchmarks.suites.aot.programs import build, mesh_of

# `make test-aot` and `python -m benchmarks.head_aot --make-env` make it.
DEFAULT = ROOT / ".venv-aot"
SITE_PACKAGES = ("lib/python*/site-packages", "Lib/site-packages")
PACKAGES = {"tpu": "libtpu", "cuda": "jax-cuda12-pjrt"}
HOW = "python -m benchmarks.head_aot --make-env"

# Set before JAX is imported: without them libtpu looks for the TPU of this host, writes logs, and lets one process in.
_QUIET = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


# The TPU's compiler reports in one of two forms that a program does not fit, with the memory of temporaries or of all.
_TOO_LARGE = re.compile(r"(?:temporaries \(|Used )([\d.]+)([KMGT])\)? (?:exceeds|of)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def variables(dump: str) -> dict[str, str]:
    """Returns the environment variables of a compiling process, whose compiler writes its reports to `dump`."""
    return {**_QUIET, "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text"}


def installed(directory: pathlib.Path) -> dict[str, str]:
    """Returns the installed versions of JAX and the compilers in an environment."""
    packages = [str(path) for pattern in SITE_PACKAGES for path in directory.glob(pattern)]
    have = {found.name: found.version for found in metadata.distributions(path=packages)}
    return {name: have[name] for name in ("jax", "jaxlib", *PACKAGES.values()) if name in have}


def missing(directory: pathlib.Path, platform: str, how: str = HOW) -> str | None:
    """Explains why an environment cannot compile for a platform and how to change that, or returns None if it can."""
    have, package = installed(directory), PACKAGES[platform]
    if not have:
        return f"there is no environment at {directory}; `{how}` makes it"
    if package not in have:
        return f"{package} is not installed in {directory}; `{how}` installs it"
    return None


def make(directory: pathlib.Path) -> None:
    """Makes the environment: the JAX of this process, the libtpu that it pins, and the CUDA plug-in without CUDA."""
    jax = metadata.version("jax")
    # The CUDA compiler needs none of the CUDA libraries, which are gigabytes.
    plugin = ("--no-deps", f"jax-cuda12-plugin=={jax}", f"jax-cuda12-pjrt=={jax}")
    environments.make(directory, [f"jax[tpu]=={jax}"], plugin)


def compile_in(directory: pathlib.Path, order: Order) -> Plan:
    """Compiles an order in a process of an environment.

    Raises:
      RemoteError: if the compiler refuses the program, or dies.
    """
    with tempfile.TemporaryDirectory() as dump:
        python = environments.interpreter(directory)
        module = "benchmarks.suites.aot.compiler"
        with start(module, python=python, settings=variables(dump), quiet=True) as remote:
            remote.ask(do="load", dump=dump)
            return Plan(**remote.ask(do="plan", order=dataclasses.asdict(order)))


def too_large(message: str) -> Plan | None:
    """Reads the plan that does not fit from an error of the compiler; None if it is another error."""
    found = _TOO_LARGE.search(message)
    return Plan(temp_bytes=round(float(found[1]) * _UNITS[found[2]]), fits=False) if found else None


def text_of(compiled: jax.stages.Compiled, dump: pathlib.Path) -> str:
    """Returns the compiled program, from the dump where JAX cannot print it."""
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        printed = _largest(dump, "*after_codegen.txt")
        if not printed:
            raise
        return printed


def _largest(dump: pathlib.Path, pattern: str) -> str:
    """Reads the largest file, which is that of the program; JAX compiles constants too."""
    found = sorted(dump.glob(pattern), key=lambda path: path.stat().st_size)
    return found[-1].read_text() if found else ""


def plan(order: Order, dump: pathlib.Path) -> Plan:
    """Compiles an order, and reads the plan from the program and from the reports in `dump`."""
    mesh = mesh_of(order.device, order.layout)
    tile = None if order.tile is None else kljax.Tile(*order.tile)
    lowered = build(order.program, mesh, order.problem, tile).lower()
    # JAX 0.12 has no such option.
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
    memory, module, hertz = compiled.memory_analysis(), hlo.parse(text), DEVICES[order.device].hertz
    assert memory is not None
    moved = hlo.collectives(module)
    return Plan(
        temp_bytes=memory.temp_size_in_bytes,
        seconds=None if hertz is None else hlo.estimated_cycles(module) / hertz,
        collective_bytes=sum(one.total for one in moved),
        collective_executions=sum(one.executions for one in moved),
        collectives=[one._asdict() for one in moved],
        largest_buffers=[one._asdict() for one in hlo.largest_buffers(assignment)],
        compile_seconds=round(seconds, 1),
    )


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiles programs in the process of an environment; the compiler writes its reports to the directory `dump`."""

    dump: str

    def plan(self, order: dict[str, Any]) -> dict[str, Any]:
        """Compiles an order, and returns the fields of the plan."""
        return dataclasses.asdict(plan(Order.from_json(order), pathlib.Path(self.dump)))


# The worker of `compile_in` calls it.
load = Compiler
