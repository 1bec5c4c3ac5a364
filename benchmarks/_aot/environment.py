"""The environment with the compilers, which is not that of the project: libtpu, and the CUDA plug-in of JAX."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from importlib.metadata import version

from benchmarks._aot.order import Order, Plan

ROOT = pathlib.Path(__file__).parents[2]
# What `make test-aot` and `python -m benchmarks.head_aot --make-env` fill.
DEFAULT = ROOT / ".venv-aot"
PACKAGES = {"tpu": "libtpu", "cuda": "jax-cuda12-pjrt"}
HOW = "python -m benchmarks.head_aot --make-env"

# Before JAX is imported: without them libtpu looks for the TPU of this host, writes logs, and lets one process in.
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


class CompilerError(RuntimeError):
    """The compiler refused a program, or died; the message ends with what it said."""


def variables(dump: str) -> dict[str, str]:
    """The environment variables of a process that compiles; the compiler writes its reports to the directory `dump`."""
    return {**os.environ, **_QUIET, "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text"}


def python_of(directory: pathlib.Path) -> pathlib.Path:
    return directory / "bin" / "python"


def installed(directory: pathlib.Path) -> dict[str, str]:
    """Versions of JAX and the compilers in an environment; those that are not there are left out."""
    names = ["jax", "jaxlib", *PACKAGES.values()]
    script = (
        "import json, sys; from importlib import metadata; "
        "have = {d.name: d.version for d in metadata.distributions()}; "
        "print(json.dumps({n: have[n] for n in sys.argv[1:] if n in have}))"
    )
    python = python_of(directory)
    if not python.exists():
        return {}
    done = subprocess.run([python, "-c", script, *names], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def missing(directory: pathlib.Path, platform: str, how: str = HOW) -> str | None:
    """Why nothing can be compiled for a platform in an environment, and how to change that; None if it can."""
    have, package = installed(directory), PACKAGES[platform]
    if not have:
        return f"there is no environment at {directory}; `{how}` makes it"
    if package not in have:
        return f"{package} is not installed in {directory}; `{how}` installs it"
    return None


def make(directory: pathlib.Path) -> None:
    """Makes the environment: the JAX of this process, the libtpu that it pins, and the CUDA plug-in without CUDA."""
    if not python_of(directory).exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    jax = version("jax")
    install = [str(python_of(directory)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, f"jax[tpu]=={jax}"], check=True)
    # Its compiler needs none of the CUDA libraries, which are gigabytes.
    subprocess.run([*install, "--no-deps", f"jax-cuda12-plugin=={jax}", f"jax-cuda12-pjrt=={jax}"], check=True)


def compile_in(directory: pathlib.Path, order: Order, timeout: float = 1800) -> Plan:
    """What the compiler plans for an order, in a process of its own.

    Raises:
      CompilerError: if the process fails.
    """
    with tempfile.TemporaryDirectory() as dump:
        command = [str(python_of(directory)), "-m", "benchmarks._aot.worker", order.to_json(), dump]
        done = subprocess.run(
            command, cwd=ROOT, env=variables(dump), capture_output=True, text=True, check=False, timeout=timeout
        )
    if done.returncode:
        raise CompilerError(f"{order}: {done.stderr.strip()[-2000:]}")
    return Plan(**json.loads(done.stdout.splitlines()[-1]))
