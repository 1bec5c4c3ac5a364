"""The flags that XLA and libtpu start with on this machine's accelerator, set before JAX starts.

No flag changes a result: they order and fuse what is computed anyway, and say how much memory JAX allocates. XLA ends
the process at a flag that it does not know, so that other releases of JAX than those of `RELEASES` get none.
"""

import os
from collections.abc import Mapping, MutableMapping
from importlib import metadata, util
from typing import NamedTuple

from train.config.accelerator import CPU, find_accelerator
from train.config.types import XlaFlags

XLA = "XLA_FLAGS"
LIBTPU = "LIBTPU_INIT_ARGS"
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
NEW_MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"
"""The name that later releases of JAX prefer; JAX refuses both at once."""
RELEASES = ((0, 10), (0, 12))
"""The first and the last release of jaxlib whose compilers were seen to know the flags."""


class AcceleratorFlags(NamedTuple):
    """The flags of an accelerator, and how JAX is known to use it.

    Attributes:
      modules: of which JAX needs one for this accelerator.
      variable: of the environment, which holds the flags.
      flags: by name, with their values.
      others: variables of their own.
    """

    modules: tuple[str, ...]
    variable: str
    flags: Mapping[str, str]
    others: Mapping[str, str]


GPU_MEMORY_FRACTION = "0.9"
"""JAX's own default, 0.75, leaves a quarter of a GPU to libraries that need a few GiB."""
_GPU = AcceleratorFlags(
    ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    XLA,
    {"--xla_gpu_enable_latency_hiding_scheduler": "true"},
    {MEMORY_FRACTION: GPU_MEMORY_FRACTION},
)
# libtpu does by itself what MaxText asks it for: the compiled programs are the same (docs/accelerators.md).
_TPU = AcceleratorFlags(("libtpu",), LIBTPU, {}, {})
FLAGS: Mapping[str, AcceleratorFlags] = {"cuda12": _GPU, "cuda13": _GPU, "tpu": _TPU}
PLATFORM_EXTRAS = {"cuda": "cuda12", "tpu": "tpu"}
"""Extras of kljax by the platform of a topology."""


def set_flags(switch: XlaFlags) -> None:
    """Sets the flags for this machine's accelerator in the environment; call it before the first use of a device."""
    if switch == "auto":
        add_flags(os.environ, used_accelerator(os.environ))


def used_accelerator(environment: Mapping[str, str]) -> str:
    """Returns the accelerator of this machine as an extra of kljax, "cpu" if JAX does not use it."""
    accelerator = find_accelerator()
    if accelerator == CPU or not any(map(util.find_spec, FLAGS[accelerator].modules)):
        return CPU
    platforms = environment.get("JAX_PLATFORMS", "").split(",")
    names = {"tpu"} if accelerator == "tpu" else {"cuda", "gpu"}
    return accelerator if platforms == [""] or names & set(platforms) else CPU


def add_flags(environment: MutableMapping[str, str], accelerator: str, release: str | None = None) -> None:
    """Adds the flags of an accelerator to an environment; those that are there stay as they are.

    Args:
      environment: what it changes.
      accelerator: an extra of kljax.
      release: of jaxlib; None: the installed one.
    """
    if accelerator not in FLAGS or not _is_known(release or metadata.version("jaxlib")):
        return
    settings = FLAGS[accelerator]
    present = environment.get(settings.variable, "").split()
    names = {flag.partition("=")[0] for flag in present}
    added = [f"{name}={value}" for name, value in settings.flags.items() if name not in names]
    if added:
        environment[settings.variable] = " ".join([*added, *present])
    for name, value in settings.others.items():
        if NEW_MEMORY_FRACTION not in environment:
            environment.setdefault(name, value)


def _is_known(release: str) -> bool:
    major, minor, *_ = release.split(".")
    first, last = RELEASES
    return first <= (int(major), int(minor)) <= last


def flags_line(switch: XlaFlags, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns a line with the flags that are in force; None without an accelerator."""
    accelerator = used_accelerator(environment)
    if accelerator == CPU:
        return None
    names = (FLAGS[accelerator].variable, MEMORY_FRACTION, NEW_MEMORY_FRACTION)
    shown = [f"{name}={environment[name]}" for name in names if environment.get(name)]
    return f"xla_flags {switch}: {', '.join(shown) or 'none is set'}"
