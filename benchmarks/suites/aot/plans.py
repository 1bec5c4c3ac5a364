"""The programs that are compiled for accelerators, the plans of their compilers, their targets and tables."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.harness.report import MIB, Report, table
from benchmarks.harness.results import Check, ratio

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
COLUMNS = (("", ""), ("temporary MiB", ""), ("estimated ms", ".1f"), ("collectives MiB", ""), ("executions", "d"))
_SHARDED = ("naive", "tunix", "kljax", "naive_forward", "kljax_forward", "kljax_kl")
_GPU = ("naive", "tunix", "kljax", "naive_forward", "kljax_forward", "naive_kl", "kljax_kl")


class Accelerator(NamedTuple):
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
    "v5e": Accelerator("tpu", "v5e:2x2", "v5e:4x4", 1.5e9),
    "v5p": Accelerator("tpu", "v5p:2x2x1", "v5p:2x2x4", 1.75e9),
    "v6e": Accelerator("tpu", "v6e:2x2", "v6e:4x4", 1.75e9),
    "h100": Accelerator("cuda", "h100:1"),
    "h200": Accelerator("cuda", "h200:1"),
}


@dataclasses.dataclass(frozen=True)
class HeadSizes:
    """Tokens and sequences of a device, model width, vocabulary, and tokens of one chunk of Tunix's form."""

    tokens: int = 16_384
    rows: int = 16
    width: int = 4096
    vocab: int = 151_936
    chunk: int = 1024


# Accelerator, layout and program.
Key = tuple[str, str, str]

FULL = HeadSizes()
# A smoke test with sizes that divide nothing.
QUICK = HeadSizes(tokens=512, rows=4, width=256, vocab=2200, chunk=128)


@dataclasses.dataclass(frozen=True)
class Order:
    """A program to compile.

    Attributes:
      device, layout, program: keys of `DEVICES`, `LAYOUTS` and `TITLES`.
      tile: tokens and vocabulary; None takes the default of the device.
      effort: of the compiler, from -1 to 1; None leaves its default. Low efforts take more memory.
      keep: directory for the compiled program and its buffer assignment, or None.
    """

    device: str
    layout: str
    program: str
    tile: tuple[int, int] | None = None
    effort: float | None = None
    problem: HeadSizes = FULL
    keep: str | None = None

    def __str__(self) -> str:
        return " ".join(self.key) + ("" if self.tile is None else " {}x{}".format(*self.tile))

    @property
    def key(self) -> Key:
        """Returns device, layout and program."""
        return self.device, self.layout, self.program

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Order":
        """Reads an order from plain data, where a tile is a list."""
        known = {field.name: fields[field.name] for field in dataclasses.fields(cls)}
        tile = None if fields["tile"] is None else tuple(fields["tile"])
        return cls(**{**known, "tile": tile, "problem": HeadSizes(**fields["problem"])})


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """The plan of a compiler for one run on one device; nothing ran.

    Attributes:
      temp_bytes: temporary memory, without arguments and results.
      fits: whether the program fits into memory; otherwise only `temp_bytes` is known.
      seconds: the compiler's estimate, see `hlo.estimated_cycles`; None where it makes none.
      collective_bytes: sum of the payloads over all executions.
      collectives: largest first, see `train.plan.compiler.collectives.Collective`.
      largest_buffers: of the temporary memory, see `train.plan.compiler.buffers.Buffer`.
      failed: the error where there is no plan, or None.
    """

    temp_bytes: int = 0
    fits: bool = True
    seconds: float | None = None
    collective_bytes: int = 0
    collective_executions: int = 0
    collectives: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    largest_buffers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    compile_seconds: float = 0.0
    failed: str | None = None


def programs_of(device: str) -> list[Key]:
    """Lists the programs that the table needs of a device."""
    if DEVICES[device].platform == "cuda":
        return [(device, "one", program) for program in _GPU]
    return [(device, "one", program) for program in TITLES] + [(device, "sharded", program) for program in _SHARDED]


class PlanTarget(NamedTuple):
    """A bound of a field of `CompiledPlan`, for all devices of a platform or each, over another program's or alone."""

    title: str
    platform: str
    value: str
    program: str
    limits: float | Mapping[str, float]
    baseline: str | None = None


MEMORY_MIB = {"v5e": 300, "v6e": 300, "v5p": 340}
FORWARD_MIB = {"v5e": 1, "v6e": 1, "v5p": 70}
COLLECTIVES = 1 / 10
TIME_OF_NAIVE = {"v5e": 0.95, "v6e": 0.95, "v5p": 1.1}
TARGETS = (
    PlanTarget("temporary memory over naive JAX", "cuda", "temp_bytes", "kljax", 1 / 50, "naive"),
    PlanTarget("temporary memory", "tpu", "temp_bytes", "kljax", MEMORY_MIB),
    PlanTarget("temporary memory, forward only", "tpu", "temp_bytes", "kljax_forward", FORWARD_MIB),
    PlanTarget("estimated time over Tunix, chunks", "tpu", "seconds", "kljax", 0.65, "tunix"),
    PlanTarget("estimated time over naive JAX", "tpu", "seconds", "kljax", TIME_OF_NAIVE, "naive"),
    PlanTarget("estimated time with exact KL over without", "tpu", "seconds", "kljax_kl", 1.6, "kljax"),
    PlanTarget("collectives over Tunix, chunks", "tpu", "collective_bytes", "kljax", COLLECTIVES, "tunix"),
)


def checks(plans: Mapping[Key, CompiledPlan]) -> list[Check]:
    """Compares the plans of each device and layout with their targets; a program that is not there has none."""
    rows = []
    for device, layout, target in itertools.product(DEVICES, LAYOUTS, TARGETS):
        plan = plans.get((device, layout, target.program))
        other = plans.get((device, layout, target.baseline or target.program))
        if DEVICES[device].platform != target.platform or plan is None or other is None:
            continue
        if target.value == "collective_bytes" and not other.collective_bytes:
            continue
        value = ratio(getattr(plan, target.value), getattr(other, target.value) if target.baseline else MIB)
        limit = target.limits[device] if isinstance(target.limits, Mapping) else target.limits
        title, unit = f"{device}, {layout}: {target.title}", "" if target.baseline else "MiB"
        rows.append(Check(title, limit, value, unit=unit, missing="nothing to compare with", digits=3))
    return rows


def report(fields: Mapping[str, Any]) -> Report:
    """Makes the tables of plans, with the targets if all programs of the devices are there; or that of tiles."""
    names = {field.name for field in dataclasses.fields(CompiledPlan)}
    compiled = [
        (Order.from_json(result), CompiledPlan(**{name: result[name] for name in names & set(result)}))
        for result in fields["results"]
    ]
    problem = compiled[0][0].problem
    head = (
        f"{fields['date']}, {', '.join(f'{name} {version}' for name, version in fields['versions'].items())}; "
        f"N={problem.tokens:,} tokens on each device, D={problem.width:,}, V={problem.vocab:,}, bfloat16."
    )
    failures = [f"{order}: {plan.failed}" for order, plan in compiled if plan.failed]
    if any(order.tile for order, _ in compiled):
        rows = []
        for order, plan in compiled:
            tile = "default" if order.tile is None else "{}x{}".format(*order.tile)
            rows.append([order.device, order.layout, tile, _memory(plan), _milliseconds(plan)])
        columns = [("device", ""), ("layout", ""), ("tile", ""), *COLUMNS[1:3]]
        return Report([head, table(columns, rows)], failures=failures)
    plans = {order.key: plan for order, plan in compiled}
    full = problem == FULL and all(key in plans for device in {key[0] for key in plans} for key in programs_of(device))
    known = {key: plan for key, plan in plans.items() if not plan.failed}
    return Report([head, *plans_tables(plans)], checks(known) if full else (), failures=failures)


def plans_tables(plans: Mapping[Key, CompiledPlan]) -> list[str]:
    """Returns a table for each device and layout, after its title."""
    parts = []
    for device, (layout, title) in itertools.product(DEVICES, LAYOUTS.items()):
        rows = [
            _row(name, plans[device, layout, program])
            for program, name in TITLES.items()
            if (device, layout, program) in plans
        ]
        parts += [f"**{device}, {title}**", table(COLUMNS, rows)] if rows else []
    return parts


def _row(title: str, plan: CompiledPlan) -> list[Any]:
    moved = _mib(plan.collective_bytes) if plan.collective_executions else None
    return [title, _memory(plan), _milliseconds(plan), moved, plan.collective_executions or None]


def _memory(plan: CompiledPlan) -> str:
    return "failed" if plan.failed else f"{_mib(plan.temp_bytes)}{'' if plan.fits else ', does not fit'}"


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}" if size < 100 * MIB else f"{size / MIB:,.0f}"


def _milliseconds(plan: CompiledPlan) -> float | None:
    return None if plan.seconds is None or not plan.fits else plan.seconds * 1e3
