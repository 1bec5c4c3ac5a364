"""Time and machine of a measurement."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax


def describe(device: jax.Device) -> dict[str, Any]:
    """Returns date, processor, memory and system, the kind of a GPU, and the flags of XLA."""
    memory = _field("/proc/meminfo", "MemTotal")
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": f"{os.cpu_count()} cores",
        "memory": memory and f"{int(memory.split()[0]) / 2**20:.0f} GiB",
        "system": f"{platform.system()}, Python {platform.python_version()}",
    }
    if device.platform != "cpu":
        found["device"] = device.device_kind
    if os.environ.get("XLA_FLAGS"):
        found["flags"] = f"`XLA_FLAGS={os.environ['XLA_FLAGS']}`"
    return found


def load() -> float | None:
    """Returns the load average of the last minute, or None if the system has none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def release() -> str:
    """Returns the version of kljax and the commit of this checkout."""
    return f"{importlib.metadata.version('kljax')} {commit() or ''}".strip()


def commit() -> str | None:
    """Returns the commit of this checkout, marked if files have changed since; None outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty=, changed", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"({done.stdout.strip()})"


def _field(path: str, name: str) -> str | None:
    """Returns the value of the line `name: value` of a system file."""
    file = pathlib.Path(path)
    lines = file.read_text().splitlines() if file.exists() else []
    values = [line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == name]
    return values[0] if values else None
