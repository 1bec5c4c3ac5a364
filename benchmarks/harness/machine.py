"""Time and machine of a measurement."""

import datetime
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

import jax

import kljax
from benchmarks.harness.measure import load
from benchmarks.harness.process import ROOT

CPUINFO = pathlib.Path("/proc/cpuinfo")


def conditions(device: str | None = None) -> dict[str, Any]:
    """Returns the first fields of a report: machine, versions and load; the command adds the load at the end."""
    return {"machine": describe(jax.devices(device)[0]), "versions": versions(), "load": [load(), None]}


def describe(device: jax.Device) -> dict[str, Any]:
    """Returns date, processor, memory and system, the kind of a GPU, and the flags of XLA."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    models = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system has these names
        memory = None
    fields = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": f"{os.cpu_count()} cores",
        "memory": memory and f"{memory / 2**30:.0f} GiB",
        "system": f"{platform.system()}, Python {platform.python_version()}",
    }
    if device.platform != "cpu":
        fields["device"] = device.device_kind
    if os.environ.get("XLA_FLAGS"):
        fields["flags"] = f"`XLA_FLAGS={os.environ['XLA_FLAGS']}`"
    return fields


def versions() -> dict[str, str]:
    """Returns the versions of kljax and JAX; kljax with the commit of this checkout if it is one."""
    release = kljax.__version__
    command = ["git", "describe", "--always", "--dirty=, changed", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        release = f"{release} ({done.stdout.strip()})"
    except (OSError, subprocess.CalledProcessError):
        pass
    return {"kljax": release, "jax": jax.__version__}
