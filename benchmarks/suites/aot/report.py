"""The plans and their targets as Markdown."""

import datetime
from collections.abc import Mapping, Sequence

from benchmarks.harness.report import number, table, targets
from benchmarks.suites.aot.plans import DEVICES, LAYOUTS, MIB, TITLES, Key, Order, Plan, Problem, checks

COLUMNS = ("", "temporary MiB", "estimated ms", "collectives MiB", "executions")


def markdown(
    compiled: Sequence[tuple[Order, Plan | str]],
    versions: Mapping[str, str],
    problem: Problem,
    *,
    date: str,
    goals: bool,
) -> str:
    """Returns the conditions, and the tables of plans and targets, or of tiles if the orders have some.

    Args:
      compiled: orders with their plans or errors; date: of the run; goals: whether there is a table of targets.
    """
    plans = {order.key: plan for order, plan in compiled}
    head = (
        f"{date}, {', '.join(f'{name} {version}' for name, version in versions.items())}; "
        f"N={problem.tokens:,} tokens on each device, D={problem.width:,}, V={problem.vocab:,}, bfloat16."
    )
    if any(order.tile for order, _ in compiled):
        return f"{head}\n\n{tiles_table(compiled)}\n"
    parts = [head, plans_table(plans)]
    if goals:
        known = {key: plan for key, plan in plans.items() if isinstance(plan, Plan)}
        parts.append("\n".join(targets(checks(known))))
    return "\n\n".join(parts) + "\n"


def plans_table(plans: Mapping[Key, Plan | str]) -> str:
    """Returns a table for each device and layout."""
    blocks = []
    for device in DEVICES:
        for layout, title in LAYOUTS.items():
            keys = [(device, layout, program) for program in TITLES]
            rows = [_row(key[2], plans[key]) for key in keys if key in plans]
            if rows:
                blocks.append("\n".join([f"**{device}, {title}**", "", *table(COLUMNS, rows)]))
    return "\n\n".join(blocks)


def tiles_table(compiled: Sequence[tuple[Order, Plan | str]]) -> str:
    """Returns a table of the tiles of kljax."""
    rows = [
        (
            order.device,
            order.layout,
            "default" if order.tile is None else "{}x{}".format(*order.tile),
            *(("failed", "") if isinstance(plan, str) else (_mib(plan.temp_bytes), _milliseconds(plan.seconds))),
        )
        for order, plan in compiled
    ]
    return "\n".join(table(("device", "layout", "tile", *COLUMNS[1:3]), rows))


def today() -> str:
    """Returns the date."""
    return datetime.date.today().isoformat()


def _row(program: str, plan: Plan | str) -> list[str]:
    if isinstance(plan, str):
        return [TITLES[program], "failed", "", "", ""]
    if not plan.fits:
        return [TITLES[program], f"{_mib(plan.temp_bytes)}, does not fit", "", "", ""]
    moved = _mib(plan.collective_bytes) if plan.collective_executions else ""
    executions = str(plan.collective_executions or "")
    return [TITLES[program], _mib(plan.temp_bytes), _milliseconds(plan.seconds), moved, executions]


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}" if size < 100 * MIB else f"{size / MIB:,.0f}"


def _milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1e3, ".1f")
