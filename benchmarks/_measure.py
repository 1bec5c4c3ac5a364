"""Time, agreement and peak memory of the contenders of one process; a part of each process that runs some."""

import ctypes
import dataclasses
import gc
import pathlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks._inputs import Options

STATUS, CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


class Contenders(Protocol):
    """The rows that a process can run."""

    options: Options

    def prepare(self, name: str) -> None:
        """Does what is not part of a run, if it can be done before."""

    def run(self, name: str) -> Sequence[Any]:
        """The finished outputs of a row: loss, then gradients."""

    def arrays(self, outputs: Sequence[Any]) -> list[np.ndarray]:
        """The same as float32 arrays; the gradient of the head as `[D, V]`."""

    def nbytes(self, outputs: Sequence[Any]) -> int:
        """Memory of the outputs."""

    def device_peak(self, name: str) -> int | None:
        """Largest memory of the GPU during a run, less its results and what was there before; None if unknown."""

    def versions(self) -> dict[str, str]:
        """Of the libraries."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """A loss, and its relative difference and that of its gradients from those of another contender.

    Attributes:
      loss: the value.
      loss_difference: of the losses.
      gradient_difference: norm of the difference over the norm, of the gradient where it is largest.
    """

    loss: float
    loss_difference: float
    gradient_difference: float


def timed(contenders: Contenders, name: str) -> tuple[float, float]:
    """Wall-clock and CPU seconds of one run, without giving its results back."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = contenders.run(name)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    del outputs
    return seconds


def save_outputs(contenders: Contenders, name: str, directory: pathlib.Path) -> None:
    """Keeps the outputs of a row, to compare others with."""
    for index, array in enumerate(contenders.arrays(contenders.run(name))):
        np.save(directory / f"{name}.{index}.npy", array)


def compare(contenders: Contenders, name: str, directory: pathlib.Path, baseline: str) -> Agreement:
    """How far a row is from the saved outputs of another one."""
    found = contenders.arrays(contenders.run(name))
    expected = [np.load(directory / f"{baseline}.{index}.npy", mmap_mode="r") for index in range(len(found))]
    (loss, *gradients), (expected_loss, *expected_gradients) = found, expected
    apart = [distance(a, b) for a, b in zip(gradients, expected_gradients, strict=True)]
    return Agreement(float(loss), distance(loss[None], expected_loss[None]), max(apart))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm, in float64; NaN is infinitely far."""
    if found.shape != expected.shape:
        raise ValueError(f"got the shape {found.shape}, expected {expected.shape}")
    apart = size = 0.0
    for a, b in zip(found, expected, strict=True):
        wide = np.asarray(b, np.float64)
        apart += float(np.sum((a - wide) ** 2))
        size += float(np.sum(wide**2))
    return (apart / size) ** 0.5 if np.isfinite(apart) else float("inf")


def peak(contenders: Contenders, name: str, small: Contenders) -> int | None:
    """Bytes that a run adds to the memory of the process at its peak, less its results.

    On the CPU it is the growth of the resident set, which says something only in a fresh process that has run `name`
    once on a small problem: libraries, threads and compiled code are there already. None where the system does not
    tell.
    """
    small.run(name)
    if contenders.options.device == "gpu":
        return contenders.device_peak(name)
    if not (STATUS.exists() and CLEAR.exists()):
        return None
    before = begin_peak()
    outputs = contenders.run(name)
    return resident("VmHWM") - before - contenders.nbytes(outputs)


def begin_peak() -> int:
    """Frees what can be freed, and counts the peak ("VmHWM") from here on; returns what is resident, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """A size of the process's memory, in bytes."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024
