"""The accelerator of this machine, by its device files, and the extra of kljax for it.

It imports nothing but the standard library, so that it runs before the environment is there.
"""

import re
from pathlib import Path

from train.config.installation import INSTALLED

CPU = "cpu"
GOOGLE = "0x1ae0"
"""The PCI vendor of TPUs, which newer virtual machines hand over by VFIO."""
CUDA_13_DRIVER = 580
"""The first driver of NVIDIA with CUDA 13."""


def find_accelerator(root: Path = Path("/")) -> str:
    """Finds the extra of kljax for this machine: "cuda12", "cuda13", "tpu", or "cpu" without an accelerator.

    Args:
      root: of the file system.
    """
    devices = root / "dev"
    if any(devices.glob("nvidia[0-9]*")):
        return "cuda12" if 0 < _driver(root) < CUDA_13_DRIVER else "cuda13"
    if any(devices.glob("accel[0-9]*")) or (any((devices / "vfio").glob("[0-9]*")) and _has_google_device(root)):
        return "tpu"
    return CPU


def _driver(root: Path) -> int:
    """Returns the main version of the NVIDIA driver, 0 where the kernel does not tell it."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    found = re.search(r"Kernel Module\b.*?\s(\d+)\.\d+", text)
    return int(found[1]) if found else 0


def _has_google_device(root: Path) -> bool:
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text(encoding="utf-8").strip() == GOOGLE for vendor in vendors)


def idle_accelerator(root: Path = Path("/")) -> str | None:
    """Returns a warning for a run on CPUs that a machine with an accelerator could do better; None on other machines.

    Args:
      root: of the file system.
    """
    extra = find_accelerator(root)
    if extra == CPU:
        return None
    device = "a TPU" if extra == "tpu" else "an NVIDIA GPU"
    run = f"pip install 'kljax[train,{extra}]'" if INSTALLED else f"make train ACCELERATOR={extra}"
    return (
        f"this machine has {device}, but JAX uses its CPUs; run {run} (JAX_PLATFORMS=cpu chooses CPUs without this "
        "warning)"
    )
