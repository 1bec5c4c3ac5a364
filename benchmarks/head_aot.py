"""Memory, collectives and estimated time that the compilers of accelerators plan for head and loss.

    make .venv-aot/.ready                        once; the compilers, in an environment of their own
    python -m benchmarks.head_aot --json PATH --markdown PATH

The command makes the tables of `docs/benchmarks-aot.md`. It needs no accelerator.
"""

import argparse
import dataclasses
import datetime
import itertools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness import cli
from benchmarks.harness.process import RemoteError
from benchmarks.harness.race import log
from benchmarks.harness.report import MIB, Check, Report, ratio, table
from benchmarks.suites import compiler
from benchmarks.suites.compiler import DEVICES, FULL, QUICK, CompiledPlan, Key, Order

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


def programs_of(device: str) -> list[Key]:
    """Lists the programs that the table needs of a device."""
    if DEVICES[device].platform == "cuda":
        return [(device, "one", program) for program in _GPU]
    return [(device, "one", program) for program in TITLES] + [(device, "sharded", program) for program in _SHARDED]


def orders_of(options: argparse.Namespace, targets: Sequence[str]) -> list[Order]:
    """Lists the programs to compile."""
    problem = QUICK if options.quick else FULL
    wanted = {"kljax"} if options.tiles else set(options.programs)
    orders = []
    for target in targets:
        effort = -1.0 if options.quick and DEVICES[target].platform == "tpu" else None
        keys = [key for key in programs_of(target) if key[2] in wanted]
        for key, tile in itertools.product(keys, options.tiles or [None]):
            orders.append(Order(*key, tile=tile, effort=effort, problem=problem))
    return orders


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    reasons = {name: compiler.missing(options.env, DEVICES[name].platform) for name in options.targets}
    for name, reason in reasons.items():
        if reason:
            log(f"skipped {name}: {reason}")
    usable = [name for name, reason in reasons.items() if not reason]
    orders = orders_of(options, usable)
    results = list[dict[str, Any]]()
    if not orders:
        raise cli.EndError(f"none of --programs is compiled for {', '.join(usable) or 'no target'}")
    versions = compiler.installed(options.env)
    date = datetime.date.today().isoformat()
    # One program after the other, since each takes all cores and gigabytes.
    for number, order in enumerate(orders, 1):
        try:
            plan = compiler.compile_in(options.env, order)
        except RemoteError as error:
            plan = CompiledPlan(failed=str(error))
        results.append(dataclasses.asdict(order) | dataclasses.asdict(plan))
        done = f"{plan.temp_bytes / MIB:.1f} MiB, compiled in {plan.compile_seconds} s"
        log(f"{number}/{len(orders)} {order}: {f'failed: {plan.failed}' if plan.failed else done}")
    return {"date": date, "versions": versions, "results": results}


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
        title = f"{device}, {layout}: {target.title}"
        unit = "" if target.baseline else "MiB"
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
        columns = [("device", ""), ("layout", ""), ("tile", ""), *COLUMNS[1:3]]
        rows = [
            [order.device, order.layout, "{}x{}".format(*order.tile), *_cells(plan)[:2]]
            for order, plan in compiled
            if order.tile
        ]
        return Report([head, table(columns, rows)], failures=failures)
    plans = {order.key: plan for order, plan in compiled}
    full = problem == FULL and all(key in plans for device in {key[0] for key in plans} for key in programs_of(device))
    known = {key: plan for key, plan in plans.items() if not plan.failed}
    return Report([head, *plans_tables(plans)], checks(known) if full else (), failures=failures)


def plans_tables(plans: Mapping[Key, CompiledPlan]) -> list[str]:
    """Returns a table for each device and layout, after its title."""
    parts = []
    for device, (layout, title) in itertools.product(DEVICES, LAYOUTS.items()):
        keys = {name: (device, layout, program) for program, name in TITLES.items()}
        rows = [[name, *_cells(plans[key])] for name, key in keys.items() if key in plans]
        parts += [f"**{device}, {title}**", table(COLUMNS, rows)] if rows else []
    return parts


def _cells(plan: CompiledPlan) -> list[Any]:
    memory = "failed" if plan.failed else _mib(plan.temp_bytes) + ("" if plan.fits else ", does not fit")
    milliseconds = None if plan.seconds is None or not plan.fits else plan.seconds * 1e3
    moved = _mib(plan.collective_bytes) if plan.collective_executions else None
    return [memory, milliseconds, moved, plan.collective_executions or None]


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}" if size < 100 * MIB else f"{size / MIB:,.0f}"


main = cli.command(
    "head_aot",
    __doc__,
    _measure,
    report,
    cli.option("--targets", nargs="+", choices=DEVICES, default=list(DEVICES), help="devices to compile for"),
    cli.option("--programs", nargs="+", choices=TITLES, default=list(TITLES), help="compile these alone; no targets"),
    cli.option("--tiles", nargs="+", type=cli.numbers("8192x2048"), metavar="TOKENSxVOCAB",
               help="compare tiles of kljax instead"),
    cli.option("--quick", action="store_true", help="a smoke test: tiny sizes, no targets"),
    cli.option("--env", type=pathlib.Path, metavar="DIR", default=compiler.DEFAULT, help="of the compilers"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
