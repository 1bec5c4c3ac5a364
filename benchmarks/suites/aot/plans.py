"""The programs that are compiled for accelerators, the plans of their compilers, and the targets of the plans."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.harness.results import Check, ratio

MIB = 2**20
GPU_TARGETS = pathlib.Path(__file__).parents[2] / "gpu_targets"
# Targets of a TPU: temporary memory with and without gradients; collectives over those of Tunix's chunks; estimated
# times over those of Tunix's chunks, of the naive form, and of kljax without KL. Of a GPU: memory over the naive form.
MEMORY_MIB = {"v5e": 300, "v6e": 300, "v5p": 340}
FORWARD_MIB = {"v5e": 1, "v6e": 1, "v5p": 70}
COLLECTIVES = 1 / 10
GPU_MEMORY = 1 / 50
TIME_OF_TUNIX = 0.65
TIME_OF_NAIVE = {"v5e": 0.95, "v6e": 0.95, "v5p": 1.1}
TIME_WITH_KL = 1.6
LAYOUTS = {"one": "one device", "sharded": "16 devices, fsdp=4 x tensor=4"}
TITLES = {
    "naive": "naive JAX",
    "tunix": "Tunix, chunks of 1,024 tokens",
    "kljax": "kljax",
    "naive_forward": "naive JAX, forward only",
    "kljax_forward": "kljax, forward only",
    "naive_frozen": "naive JAX, frozen head",
    "kljax_frozen": "kljax, frozen head",
    "naive_kl": "naive JAX, with exact KL",
    "kljax_kl": "kljax, with exact KL",
}
_SHARDED = ("naive", "tunix", "kljax", "naive_forward", "kljax_forward", "kljax_kl")
_GPU = ("naive", "tunix", "kljax", "naive_forward", "kljax_forward", "naive_kl", "kljax_kl")


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of accelerator, which need not be here.

    Attributes:
      platform: of its compiler, "tpu" or "cuda".
      one: topology whose first device stands for one chip; libtpu describes whole hosts only.
      many: topology of 16 chips, or None.
      hertz: clock of the matrix units at the published peak rate; turns estimated cycles into seconds.
    """

    platform: str
    one: str
    many: str | None = None
    hertz: float | None = None


DEVICES = {
    "v5e": Device("tpu", "v5e:2x2", "v5e:4x4", 1.5e9),
    "v5p": Device("tpu", "v5p:2x2x1", "v5p:2x2x4", 1.75e9),
    "v6e": Device("tpu", "v6e:2x2", "v6e:4x4", 1.75e9),
    "h100": Device("cuda", "1x1x1"),
    "h200": Device("cuda", "1x1x1"),
}


class Problem(NamedTuple):
    """Tokens and sequences of a device, model width, vocabulary, and tokens of one chunk of Tunix's form."""

    tokens: int = 16_384
    rows: int = 16
    width: int = 4096
    vocab: int = 151_936
    chunk: int = 1024


# Device, layout and program.
Key = tuple[str, str, str]

FULL = Problem()
# A smoke test with sizes that divide nothing.
QUICK = Problem(tokens=512, rows=4, width=256, vocab=2200, chunk=128)


@dataclasses.dataclass(frozen=True)
class Order:
    """A program to compile.

    Attributes:
      device: a key of `DEVICES`.
      layout: "one" device or "sharded" over 16.
      program: a key of `TITLES`.
      tile: tokens and vocabulary; None takes the default of the device.
      effort: of the compiler, from -1 to 1; None leaves its default. Low efforts take more memory.
      problem: the sizes.
      keep: directory for the compiled program and its buffer assignment, or None.
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
        """Returns device, layout and program."""
        return self.device, self.layout, self.program

    def to_json(self) -> str:
        """Writes the order as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Order":
        """Reads the text of `to_json`."""
        fields = json.loads(text)
        tile = fields["tile"]
        return cls(**fields | {"tile": None if tile is None else tuple(tile), "problem": Problem(*fields["problem"])})


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a compiler for one run on one device; nothing ran.

    Attributes:
      temp_bytes: temporary memory, without arguments and results.
      fits: whether the program fits into memory; otherwise only `temp_bytes` is known.
      seconds: the compiler's estimate, see `hlo.estimated_cycles`; None where it makes none.
      collective_bytes: sum of the payloads over all executions.
      collective_executions: their number.
      collectives: largest first, see `hlo.Collective`.
      largest_buffers: of the temporary memory, see `hlo.Buffer`.
      compile_seconds: time to compile.
    """

    temp_bytes: int
    fits: bool = True
    seconds: float | None = None
    collective_bytes: int = 0
    collective_executions: int = 0
    collectives: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    largest_buffers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    compile_seconds: float = 0.0


Plans = Mapping[Key, Plan]
# Title, unit, limit and value of a target.
Numbers = Iterator[tuple[str, str, float, float | None]]


def programs_of(device: str) -> list[Key]:
    """Lists the programs that the table needs of a device."""
    if DEVICES[device].platform == "cuda":
        return [(device, "one", program) for program in _GPU]
    return [(device, "one", program) for program in TITLES] + [(device, "sharded", program) for program in _SHARDED]


def checks(plans: Plans) -> list[Check]:
    """Compares the plans of each device and layout with their targets."""
    found: list[Check] = []
    for device, kind in DEVICES.items():
        for layout in LAYOUTS:
            of = {program: plans[key] for program in TITLES if (key := (device, layout, program)) in plans}
            if "kljax" in of:
                numbers = _gpu_targets(of) if kind.platform == "cuda" else _tpu_targets(device, of)
                for title, unit, limit, value in numbers:
                    missing = "nothing to compare with"
                    name = f"{device}, {layout}: {title}"
                    found.append(Check(name, limit, value, unit=unit, missing=missing, digits=3))
    return found


def _gpu_targets(of: Mapping[str, Plan]) -> Numbers:
    if "naive" in of:
        memory = of["kljax"].temp_bytes / of["naive"].temp_bytes
        yield "temporary memory over naive JAX", "", GPU_MEMORY, memory


def _tpu_targets(device: str, of: Mapping[str, Plan]) -> Numbers:
    ours = of["kljax"]
    yield "temporary memory", "MiB", MEMORY_MIB[device], ours.temp_bytes / MIB
    if forward := of.get("kljax_forward"):
        yield "temporary memory, forward only", "MiB", FORWARD_MIB[device], forward.temp_bytes / MIB
    if tunix := of.get("tunix"):
        yield "estimated time over Tunix, chunks", "", TIME_OF_TUNIX, ratio(ours.seconds, tunix.seconds)
    if naive := of.get("naive"):
        yield "estimated time over naive JAX", "", TIME_OF_NAIVE[device], ratio(ours.seconds, naive.seconds)
    if kl := of.get("kljax_kl"):
        yield "estimated time with exact KL over without", "", TIME_WITH_KL, ratio(kl.seconds, ours.seconds)
    if tunix and tunix.collective_bytes:
        yield "collectives over Tunix, chunks", "", COLLECTIVES, ratio(ours.collective_bytes, tunix.collective_bytes)
