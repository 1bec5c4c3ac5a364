"""When and where something was measured."""

import datetime
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax


def describe(device: jax.Device) -> dict[str, Any]:
    """Date, processor, memory and system; of a GPU its kind."""
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": f"{os.cpu_count()} cores",
        "memory": _memory(),
        "system": f"{platform.system()}, Python {platform.python_version()}",
    }
    if device.platform != "cpu":
        found["device"] = device.device_kind
    return found


def load() -> float | None:
    """Mean number of programs that wanted to run in the last minute, where the system tells."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def commit() -> str | None:
    """The commit of this checkout, marked where files have changed since; None outside of one."""
    command = ["git", "describe", "--always", "--dirty=, changed", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"({done.stdout.strip()})"


def _memory() -> str | None:
    total = _field("/proc/meminfo", "MemTotal")
    return None if total is None else f"{int(total.split()[0]) / 2**20:.0f} GiB"


def _field(path: str, name: str) -> str | None:
    """The value of a line `name: value` of a file of the system."""
    file = pathlib.Path(path)
    lines = file.read_text().splitlines() if file.exists() else []
    values = [line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == name]
    return values[0] if values else None
