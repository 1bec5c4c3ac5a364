"""Which programs the table holds, and the goals that its numbers are compared with."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks._aot.devices import DEVICES
from benchmarks._aot.order import Key, Plan

MIB = 2**20
# The goals: temporary memory of a TPU with gradients and without, collectives of those of Tunix's chunked form, memory
# of a GPU of that of the naive form, estimated times of those of Tunix's chunked and the naive form.
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

Plans = Mapping[Key, Plan]


class Goal(NamedTuple):
    """One number that has to stay below a limit; `got` is None where what it is compared with does not exist."""

    device: str
    layout: str
    what: str
    unit: str
    limit: float
    got: float | None

    @property
    def verdict(self) -> str:
        if self.got is None:
            return "nothing to compare with"
        return "met" if self.got <= self.limit else "missed"


def rows_of(device: str) -> list[Key]:
    """The plans that the table needs of a device."""
    if DEVICES[device].platform == "cuda":
        return [(device, "one", program) for program in _GPU]
    return [(device, "one", program) for program in TITLES] + [(device, "sharded", program) for program in _SHARDED]


def goals(plans: Plans) -> list[Goal]:
    """The goals of all devices that have plans."""
    found: list[Goal] = []
    for device in DEVICES:
        for layout in LAYOUTS:
            of = {program: plans[key] for program in TITLES if (key := (device, layout, program)) in plans}
            if "kljax" in of:
                make = _gpu_goals if DEVICES[device].platform == "cuda" else _tpu_goals
                found += (Goal(device, layout, *goal) for goal in make(device, of))
    return found


_Numbers = Iterator[tuple[str, str, float, float | None]]


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs


def _gpu_goals(device: str, of: Mapping[str, Plan]) -> _Numbers:
    if "naive" in of:
        memory = of["kljax"].temp_bytes / of["naive"].temp_bytes
        yield "temporary memory, of naive JAX", "", GPU_MEMORY, memory


def _tpu_goals(device: str, of: Mapping[str, Plan]) -> _Numbers:
    ours = of["kljax"]
    yield "temporary memory", "MiB", MEMORY_MIB[device], ours.temp_bytes / MIB
    if forward := of.get("kljax_forward"):
        yield "temporary memory, forward only", "MiB", FORWARD_MIB[device], forward.temp_bytes / MIB
    if tunix := of.get("tunix"):
        yield "estimated time, of Tunix chunked", "", TIME_OF_TUNIX, _ratio(ours.seconds, tunix.seconds)
    if naive := of.get("naive"):
        yield "estimated time, of naive JAX", "", TIME_OF_NAIVE[device], _ratio(ours.seconds, naive.seconds)
    if kl := of.get("kljax_kl"):
        yield "estimated time with exact KL, of that without", "", TIME_WITH_KL, _ratio(kl.seconds, ours.seconds)
    if tunix and tunix.collective_bytes:
        yield "collectives, of Tunix chunked", "", COLLECTIVES, ours.collective_bytes / tunix.collective_bytes
