"""Wall-clock and CPU seconds of the parts of a run, in every environment."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

Seconds = tuple[float, float]


@dataclasses.dataclass
class Laps:
    """Seconds of each part, (wall-clock, CPU of all threads of this process)."""

    seconds: dict[str, Seconds] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What the block takes; of a block that lies in another one, the outer one counts the rest."""
        wall, cpu = time.perf_counter(), time.process_time()
        inside = self._total()
        yield
        inner = self._total()
        self.seconds[name] = (
            time.perf_counter() - wall - (inner[0] - inside[0]),
            time.process_time() - cpu - (inner[1] - inside[1]),
        )

    def _total(self) -> Seconds:
        return sum(one[0] for one in self.seconds.values()), sum(one[1] for one in self.seconds.values())
