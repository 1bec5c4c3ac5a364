"""The plans and goals as tables in Markdown."""

from collections.abc import Mapping, Sequence

from benchmarks._aot.devices import DEVICES
from benchmarks._aot.order import Key, Order, Plan
from benchmarks._aot.rows import LAYOUTS, MIB, TITLES, Goal

_PLAN = ("", "temporary MiB", "estimated ms", "collectives MiB", "executions")
_GOAL = ("device", "layout", "what", "at most", "got", "verdict")
_TILE = ("device", "layout", "tile", "temporary MiB", "estimated ms")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> str:
    """A table whose columns of `numbers` are right-aligned."""
    rule = ["---:" if name in numbers else "---" for name in head]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}" if size < 100 * MIB else f"{size / MIB:,.0f}"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _row(program: str, plan: Plan | str) -> list[str]:
    if isinstance(plan, str):
        return [TITLES[program], "failed", "", "", ""]
    if not plan.fits:
        return [TITLES[program], f"{_mib(plan.temp_bytes)}, does not fit", "", "", ""]
    moved = _mib(plan.collective_bytes) if plan.collective_executions else ""
    executions = str(plan.collective_executions or "")
    return [TITLES[program], _mib(plan.temp_bytes), _milliseconds(plan.seconds), moved, executions]


def plans_table(plans: Mapping[Key, Plan | str]) -> str:
    """One table for each device and layout."""
    blocks = []
    for device in DEVICES:
        for layout, title in LAYOUTS.items():
            keys = [(device, layout, program) for program in TITLES]
            rows = [_row(key[2], plans[key]) for key in keys if key in plans]
            if rows:
                blocks.append(f"**{device}, {title}**\n\n{_table(_PLAN, rows, _PLAN[1:])}")
    return "\n\n".join(blocks)


def goals_table(goals: Sequence[Goal]) -> str:
    """Each goal with its number and whether it is met."""

    def number(value: float, unit: str) -> str:
        return f"{value:,.4g} {unit}" if unit else f"{value:.3f}"

    rows = [
        (
            goal.device,
            goal.layout,
            goal.what,
            number(goal.limit, goal.unit),
            "" if goal.got is None else number(goal.got, goal.unit),
            goal.verdict,
        )
        for goal in goals
    ]
    return _table(_GOAL, rows, ("at most", "got"))


def tiles_table(found: Sequence[tuple[Order, Plan | str]]) -> str:
    """What kljax takes with each tile."""
    rows = [
        (
            order.device,
            order.layout,
            "table" if order.tile is None else "{}x{}".format(*order.tile),
            *(("failed", "") if isinstance(plan, str) else (_mib(plan.temp_bytes), _milliseconds(plan.seconds))),
        )
        for order, plan in found
    ]
    return _table(_TILE, rows, _TILE[3:])
