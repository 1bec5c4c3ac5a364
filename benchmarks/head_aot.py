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

from benchmarks.harness import cli
from benchmarks.harness.process import RemoteError
from benchmarks.harness.race import log
from benchmarks.harness.report import MIB
from benchmarks.suites.aot import compiler, plans
from benchmarks.suites.aot.plans import DEVICES, FULL, QUICK, TITLES, Compiled, Order, Plan, programs_of


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser, tile = cli.make_parser("head_aot", __doc__), cli.numbers("8192x2048")
    add = parser.add_argument
    add("--targets", nargs="+", choices=DEVICES, default=list(DEVICES), help="devices to compile for")
    add("--programs", nargs="+", choices=TITLES, default=list(TITLES), help="compile these alone; no targets")
    add("--tiles", nargs="+", type=tile, metavar="TOKENSxVOCAB", help="compare tiles of kljax instead")
    add("--keep", type=pathlib.Path, metavar="DIR", help="for compiled programs and buffer assignments")
    add("--quick", action="store_true", help="a smoke test: tiny sizes, no targets")
    add("--env", type=pathlib.Path, metavar="DIR", default=compiler.DEFAULT, help="environment with the compilers")
    cli.add_outputs(parser)
    return parser.parse_args(arguments)


def orders_of(options: argparse.Namespace) -> list[Order]:
    """Lists the programs to compile."""
    problem = QUICK if options.quick else FULL
    keep = None if options.keep is None else str(options.keep.resolve())
    wanted = {"kljax"} if options.tiles else set(options.programs)
    orders = []
    for target in options.targets:
        effort = -1.0 if options.quick and DEVICES[target].platform == "tpu" else None
        keys = [key for key in programs_of(target) if key[2] in wanted]
        for key, tile in itertools.product(keys, options.tiles or [None]):
            orders.append(Order(*key, tile=tile, effort=effort, problem=problem, keep=keep))
    return orders


def compile_all(orders: Sequence[Order], directory: pathlib.Path) -> Compiled:
    """Compiles one program after the other, since each takes all cores and gigabytes."""
    compiled: list[tuple[Order, Plan]] = []
    for number, order in enumerate(orders, 1):
        try:
            plan = compiler.compile_in(directory, order)
        except RemoteError as error:
            plan = Plan(failed=str(error))
        compiled.append((order, plan))
        done = f"{plan.temp_bytes / MIB:.1f} MiB, compiled in {plan.compile_seconds} s"
        log(f"{number}/{len(orders)} {order}: {f'failed: {plan.failed}' if plan.failed else done}")
    return compiled


def usable(targets: Sequence[str], directory: pathlib.Path) -> list[str]:
    """Returns the devices that can be compiled for, and logs why the others cannot."""
    reasons = {platform: compiler.missing(directory, platform) for platform in compiler.PACKAGES}
    for target in targets:
        if reason := reasons[DEVICES[target].platform]:
            log(f"skipped {target}: {reason}")
    return [target for target in targets if not reasons[DEVICES[target].platform]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a program failed to compile, or none could be compiled."""
    options = parse_arguments(arguments)
    options.targets = usable(options.targets, options.env)
    if not options.targets:
        return 1
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    orders, versions, date = orders_of(options), compiler.installed(options.env), datetime.date.today().isoformat()
    if not orders:
        log(f"none of --programs is compiled for {', '.join(options.targets)}")
        return 1
    compiled = compile_all(orders, options.env)
    whole = not options.quick and len(options.programs) == len(TITLES)
    text = plans.markdown(compiled, versions, orders[0].problem, date=date, goals=whole)
    results = [{**dataclasses.asdict(order), "keep": None, **dataclasses.asdict(plan)} for order, plan in compiled]
    wrong = [f"{order}: {plan.failed}" for order, plan in compiled if plan.failed]
    return cli.finish(options, text, {"date": date, "versions": versions, "results": results}, wrong)


if __name__ == "__main__":
    sys.exit(main())
