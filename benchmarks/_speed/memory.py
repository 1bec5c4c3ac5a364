"""Peak memory of the parts of a run, as the growth of the resident set of this process."""

import contextlib
import ctypes
import dataclasses
import gc
import pathlib
from collections.abc import Iterator

from benchmarks._measure import CLEAR, STATUS


@dataclasses.dataclass
class Laps:
    """Peaks of each part in bytes, over what is resident when it begins; none where the system does not tell.

    Attributes:
      peaks: by part.
      seconds: none; a clock has them.
    """

    peaks: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    _last: int = 0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The growth within the block; a block within it starts the count of the outer one anew when it ends."""
        if not (STATUS.exists() and CLEAR.exists()):
            yield
            return
        self._last = _begin()
        yield
        self.peaks[name] = _resident("VmHWM") - self._last
        self._last = _begin()


def _begin() -> int:
    """Frees what can be freed, and counts from here on."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path(CLEAR).write_text("5")
    return _resident("VmRSS")


def _resident(field: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024
