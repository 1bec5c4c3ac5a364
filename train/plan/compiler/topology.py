"""Topologies by name: the slice shapes that exist, and their devices for a compiler, on a machine that has none."""

import dataclasses
import math
import os
import re
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources, util
from typing import TYPE_CHECKING, Any

from train.config.errors import UserError
from train.models.devices import DEVICES, Device

if TYPE_CHECKING:
    import jax

SLICES_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
"""All slices of v5e and v6e."""
SMALL_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
"""The slices of v4, v5p and tpu7x with a side below 4; of larger ones every side is a multiple of 4."""
CHIPS_3D = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}
GPUS_PER_HOST = 8
EXAMPLES = "v5e:4x4, v5p:4x4x4, v6e:8x8, tpu7x:4x4x4, h200:8 or h100:8x8 (hosts x GPUs)"
# Set before JAX starts: without them libtpu looks for the TPU of this host, writes logs, and lets one process in.
QUIET = {
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
# The modules that each compiler may come as; the group `aot` of pyproject.toml installs the first ones.
COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
INSTALL = (
    "`uv sync --group aot` installs it, and `make .venv-aot/.ready` does so in an environment of its own, as it "
    "changes the devices that JAX finds"
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine by name.

    Attributes:
      device: the kind of its devices.
      shape: chips along each axis of the torus of one slice; for GPUs hosts and GPUs of a host.
      slices: slices, or groups of hosts, connected by the data-centre network only.
    """

    device: Device
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        many = f" x {self.slices} slices" if self.slices > 1 else ""
        return f"{self.device.name}:{'x'.join(map(str, self.shape))}{many}"

    @property
    def size(self) -> int:
        """Returns the number of devices of all slices."""
        return self.slices * math.prod(self.shape) * self.device.per_chip


def parse_topology(text: str, slices: int = 1) -> Topology:
    """Parses a name such as `v5p:4x4x4`, `h200:8` or `h100:8x8`.

    Args:
      text: a kind of device, a colon and the shape of a slice.
      slices: the number of equal slices.

    Raises:
      UserError: the kind or the slice does not exist.

    Example:
      >>> parse_topology("tpu7x:2x2x1").size, parse_topology("h100:8x8").size
      (8, 64)
    """
    name, _, sizes = text.partition(":")
    parts = sizes.split("x")
    if name not in DEVICES or not all(re.fullmatch("[1-9][0-9]*", part) for part in parts):
        raise UserError(f"topology: got {text!r}, expected {EXAMPLES}")
    if slices < 1:
        raise UserError(f"slices: got {slices}, expected at least 1")
    device = DEVICES[name]
    shape = tuple(map(int, parts))
    if device.platform == "cuda":
        shape = (1, *shape) if len(shape) == 1 else shape
        if len(shape) != 2 or shape[1] > GPUS_PER_HOST:
            raise UserError(f"topology: got {text!r}, expected hosts x GPUs of a host, at most {GPUS_PER_HOST}")
    else:
        _check_slice(text, device, shape)
    return Topology(device, shape, slices)


def _check_slice(text: str, device: Device, shape: tuple[int, ...]) -> None:
    """Raises for slices that nobody can rent; libtpu would compile for them."""
    if device.name not in CHIPS_3D:
        if shape not in SLICES_2D:
            raise UserError(f"topology: got {text!r}, expected {device.name}: and one of {_listed(SLICES_2D)}")
        return
    large = len(shape) == 3 and all(side % 4 == 0 for side in shape) and math.prod(shape) <= CHIPS_3D[device.name]
    if shape not in SMALL_3D and not (large and tuple(sorted(shape)) == shape):
        raise UserError(
            f"topology: got {text!r}, expected {device.name}: and one of {_listed(SMALL_3D)}, or three ascending "
            f"multiples of 4 with at most {CHIPS_3D[device.name]} chips"
        )


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join("x".join(map(str, shape)) for shape in shapes)


def check_compiler(topology: Topology) -> None:
    """Raises `UserError` if the compiler for a topology is not installed, with the way to install it."""
    modules = COMPILERS[topology.device.platform]
    if not any(map(util.find_spec, modules)):
        name = modules[0].replace("_", "-")
        raise UserError(f"topology: {topology} needs {name}, which is not installed here; {INSTALL}")


def topology_devices(topology: Topology) -> "list[jax.Device]":
    """Lists the devices of a topology, slice by slice; arrays on them can be compiled for, and hold nothing.

    Raises:
      UserError: the compiler is not installed.
    """
    check_compiler(topology)
    from jax.experimental import topologies

    if topology.device.platform == "cuda":
        hosts, gpus = topology.shape
        options: dict[str, Any] = {
            "topology_name": "",
            "target_config": gpu_target(topology.device.name),
            "topology": f"{topology.slices}x{hosts}x{gpus}",
        }
    else:
        options = {"topology_name": f"{topology.device.name}:{'x'.join(map(str, topology.shape))}"}
        if topology.shape == (1, 1):
            options["chips_per_host_bounds"] = (1, 1, 1)
        if topology.slices > 1:
            options["num_slices"] = topology.slices
    devices = list(topologies.get_topology_desc(platform=topology.device.platform, **options).devices)
    if topology.device.platform == "cuda":
        use_target_gpu(topology, devices)
    return devices


def gpu_target(name: str) -> str:
    """Reads the `GpuTargetConfigProto` of a GPU, all that XLA's compiler has to know about it."""
    return (resources.files("train.plan.compiler") / "gpu_targets" / f"{name}.txtpb").read_text()


def load_compilers() -> None:
    """Starts JAX in a process that only compiles for other machines; call it before anything else asks for devices."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with _no_error_stream():
        import jax

        # Read from the environment when JAX was imported, perhaps before.
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
        jax.devices()


def use_target_gpu(topology: Topology, devices: "list[jax.Device]") -> None:
    """Makes this process lower kernels for the cuDNN and the cores of a GPU's target; JAX asks this machine's."""
    import jax
    from jax._src.cudnn import fused_attention_stablehlo
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    match = re.search(r"dnn_version_info \{\s*major: (\d+)\s*minor: (\d+)", gpu_target(topology.device.name))
    assert match is not None
    version = 10_000 * int(match[1]) + 100 * int(match[2])
    fused_attention_stablehlo.check_cudnn_version = lambda: version
    # It asks `jax.devices()` for cores, which a CPU has not.
    kernels: Any = transposed_ragged_dot_mgpu
    kernels.jax = types.SimpleNamespace(**{**vars(jax), "devices": lambda: devices})


@contextmanager
def _no_error_stream() -> Iterator[None]:
    """Hides the lines that plug-ins write to the standard error stream of the process while they are loaded."""
    saved = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)
