"""What one process is asked to compile, and what it answers; needs neither JAX nor a compiler."""

import dataclasses
import json
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """Tokens and rows of a batch on one device, width, vocabulary, and tokens of one chunk of Tunix's form."""

    tokens: int = 16_384
    rows: int = 16
    width: int = 4096
    vocab: int = 151_936
    chunk: int = 1024


# Device, layout and program.
Key = tuple[str, str, str]

FULL = Problem()
# Small, and dividing by nothing, to see that everything runs; its numbers mean nothing.
QUICK = Problem(tokens=512, rows=4, width=256, vocab=2200, chunk=128)


@dataclasses.dataclass(frozen=True)
class Order:
    """What to compile.

    Attributes:
      device: a key of `DEVICES`.
      layout: "one" device or "sharded" over 16.
      program: a key of `rows.TITLES`.
      tile: tokens and vocabulary; None takes the table of the library.
      effort: of the compiler for fast programs, from -1 to 1; None leaves its default. Low ones take more memory.
      problem: the sizes.
      keep: directory for the text of the program and the assignment of its buffers; None keeps neither.
    """

    device: str
    layout: str
    program: str
    tile: tuple[int, int] | None = None
    effort: float | None = None
    problem: Problem = FULL
    keep: str | None = None

    def __str__(self) -> str:
        return " ".join(self.key) + ("" if self.tile is None else " {}x{}".format(*self.tile))

    @property
    def key(self) -> Key:
        return self.device, self.layout, self.program

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Order":
        fields = json.loads(text)
        tile = fields["tile"]
        return cls(**fields | {"tile": None if tile is None else tuple(tile), "problem": Problem(*fields["problem"])})


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a compiler planned for one device and one run. Nothing ran.

    Attributes:
      temp_bytes: temporary memory, without arguments and results.
      fits: whether the compiler found room for it; otherwise only `temp_bytes` is known.
      seconds: the compiler's estimate of the arithmetic, see `cost.estimated_cycles`; None where it makes none.
      collective_bytes: payloads of the collectives, as often as they are executed.
      collective_executions: how many they are.
      collectives: each of them, those that move most first, see `cost.Collective`.
      largest_buffers: of the temporary memory, see `buffers.Buffer`.
      compile_seconds: that compiling took.
    """

    temp_bytes: int
    fits: bool = True
    seconds: float | None = None
    collective_bytes: int = 0
    collective_executions: int = 0
    collectives: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    largest_buffers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    compile_seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))
