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
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import cli
from benchmarks.harness.process import RemoteError
from benchmarks.harness.race import log
from benchmarks.harness.report import MIB
from benchmarks.suites.aot import compiler, plans
from benchmarks.suites.aot.plans import DEVICES, FULL, QUICK, TITLES, CompiledPlan, Order, programs_of


def orders_of(options: argparse.Namespace, targets: Sequence[str]) -> list[Order]:
    """Lists the programs to compile."""
    problem = QUICK if options.quick else FULL
    keep = None if options.keep is None else str(options.keep.resolve())
    wanted = {"kljax"} if options.tiles else set(options.programs)
    orders = []
    for target in targets:
        effort = -1.0 if options.quick and DEVICES[target].platform == "tpu" else None
        keys = [key for key in programs_of(target) if key[2] in wanted]
        for key, tile in itertools.product(keys, options.tiles or [None]):
            orders.append(Order(*key, tile=tile, effort=effort, problem=problem, keep=keep))
    return orders


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    reasons = {name: compiler.missing(options.env, DEVICES[name].platform) for name in options.targets}
    for name, reason in reasons.items():
        if reason:
            log(f"skipped {name}: {reason}")
    usable = [name for name, reason in reasons.items() if not reason]
    orders, results = orders_of(options, usable), list[dict[str, Any]]()
    if not orders:
        raise cli.EndError(f"none of --programs is compiled for {', '.join(usable) or 'no target'}")
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    versions, date = compiler.installed(options.env), datetime.date.today().isoformat()
    # One program after the other, since each takes all cores and gigabytes.
    for number, order in enumerate(orders, 1):
        try:
            plan = compiler.compile_in(options.env, order)
        except RemoteError as error:
            plan = CompiledPlan(failed=str(error))
        results.append({**dataclasses.asdict(order), "keep": None, **dataclasses.asdict(plan)})
        done = f"{plan.temp_bytes / MIB:.1f} MiB, compiled in {plan.compile_seconds} s"
        log(f"{number}/{len(orders)} {order}: {f'failed: {plan.failed}' if plan.failed else done}")
    return {"date": date, "versions": versions, "results": results}


main = cli.command(
    "head_aot",
    __doc__,
    _measure,
    plans.report,
    cli.option("--targets", nargs="+", choices=DEVICES, default=list(DEVICES), help="devices to compile for"),
    cli.option("--programs", nargs="+", choices=TITLES, default=list(TITLES), help="compile these alone; no targets"),
    cli.option("--tiles", nargs="+", type=cli.numbers("8192x2048"), metavar="TOKENSxVOCAB",
               help="compare tiles of kljax instead"),
    cli.option("--keep", type=pathlib.Path, metavar="DIR", help="for compiled programs and buffer assignments"),
    cli.option("--quick", action="store_true", help="a smoke test: tiny sizes, no targets"),
    cli.option("--env", type=pathlib.Path, metavar="DIR", default=compiler.DEFAULT, help="of the compilers"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
