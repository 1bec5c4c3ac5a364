"""Peak memory of the parts of a run, as the growth of the resident set of this process, which has run them before."""

import contextlib
import dataclasses
from collections.abc import Iterator

from benchmarks._measure import CLEAR, STATUS, begin_peak, resident


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
        self._last = begin_peak()
        yield
        self.peaks[name] = resident("VmHWM") - self._last
        self._last = begin_peak()
