"""Seconds and peak memory of the parts of a run, in every environment: NumPy is all that it needs."""

import contextlib
import ctypes
import dataclasses
import gc
import os
import pathlib
import time
from collections.abc import Iterator

import numpy as np

STATUS = pathlib.Path("/proc/self/status")
CLEAR = pathlib.Path("/proc/self/clear_refs")
# Wall-clock seconds, and CPU seconds of all threads of the process.
Seconds = tuple[float, float]


@dataclasses.dataclass
class Clock:
    """Seconds of each part of a run."""

    parts: dict[str, Seconds] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a block; the seconds of a block within it count for that one alone."""
        wall, cpu = time.perf_counter(), time.process_time()
        before = self._total()
        yield
        after = self._total()
        self.parts[name] = (
            time.perf_counter() - wall - (after[0] - before[0]),
            time.process_time() - cpu - (after[1] - before[1]),
        )

    def _total(self) -> Seconds:
        return sum(wall for wall, _ in self.parts.values()), sum(cpu for _, cpu in self.parts.values())


@dataclasses.dataclass
class Memory:
    """Bytes that each part of a run adds to the resident set; no parts where the system does not tell."""

    parts: dict[str, int] = dataclasses.field(default_factory=dict)
    _start: int = 0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures a block; when a block within it ends, the count of the outer one starts again."""
        if not known():
            yield
            return
        self._start = begin_peak()
        yield
        self.parts[name] = resident("VmHWM") - self._start
        self._start = begin_peak()


def load() -> float | None:
    """Returns the load average of the last minute, or None if the system has none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def known() -> bool:
    """Tells whether the system reports the peak memory of a process."""
    return STATUS.exists() and CLEAR.exists() and hasattr(ctypes.CDLL(None), "malloc_trim")


def begin_peak() -> int:
    """Frees unused memory, restarts the count of the peak ("VmHWM"), and returns the resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """Returns a field of the process's memory in bytes."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def relative_distance(array: np.ndarray, expected: np.ndarray) -> float:
    """Returns the norm of the difference over the norm of `expected`; infinity if it is not finite."""
    if array.shape != expected.shape:
        raise ValueError(f"array: got the shape {array.shape}, expected {expected.shape}")
    distance = np.linalg.norm(array - expected) / np.linalg.norm(expected)
    return float(distance) if np.isfinite(distance) else float("inf")
