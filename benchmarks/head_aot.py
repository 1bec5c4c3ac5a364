"""What the compilers of accelerators plan for head and loss: memory, collectives and estimated time, without a device.

`python -m benchmarks.head_aot` makes the tables of `docs/benchmarks-aot.md`. It needs no accelerator, but the
compilers, in an environment of their own that `--make-env` makes.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks._aot import environment
from benchmarks._aot.devices import DEVICES
from benchmarks._aot.order import FULL, QUICK, Order, Plan, Problem
from benchmarks._aot.rows import MIB, Key, goals, rows_of
from benchmarks._aot.table import goals_table, plans_table, tiles_table

Found = list[tuple[Order, Plan | str]]


def parse_tile(text: str) -> tuple[int, int]:
    """`8192x2048` as tokens and vocabulary."""
    tokens, cross, vocab = text.partition("x")
    if not (cross and tokens.isdigit() and vocab.isdigit() and int(tokens) and int(vocab)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected tokens and vocabulary such as 8192x2048")
    return int(tokens), int(vocab)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head_aot", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--targets", nargs="+", choices=DEVICES, default=list(DEVICES), help="what to compile for")
    add("--tiles", nargs="+", type=parse_tile, metavar="TOKENSxVOCAB", help="compare tiles of kljax instead")
    add("--json", type=pathlib.Path, metavar="FILE", help="write all that was found")
    add("--markdown", type=pathlib.Path, metavar="FILE", help="write the tables")
    add("--keep", type=pathlib.Path, metavar="DIR", help="keep compiled programs and buffer assignments")
    add("--quick", action="store_true", help="tiny sizes, to see that everything runs; no goals")
    add("--env", type=pathlib.Path, default=environment.DEFAULT, metavar="DIR", help="environment with the compilers")
    add("--make-env", type=pathlib.Path, nargs="?", const=environment.DEFAULT, metavar="DIR", help="make it, no more")
    return parser.parse_args(arguments)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def orders_of(options: argparse.Namespace) -> list[Order]:
    """What is to be compiled."""
    problem = QUICK if options.quick else FULL
    keep = None if options.keep is None else str(options.keep.resolve())
    keys = [key for target in options.targets for key in rows_of(target) if not options.tiles or key[2] == "kljax"]

    def effort(target: str) -> float | None:
        return -1.0 if options.quick and DEVICES[target].platform == "tpu" else None

    return [
        Order(*key, tile=tile, effort=effort(key[0]), problem=problem, keep=keep)
        for key in keys
        for tile in options.tiles or [None]
    ]


def compile_all(orders: Sequence[Order], directory: pathlib.Path) -> Found:
    """Plans, or the message of what failed; one after the other, since each takes all cores and gigabytes."""
    found: Found = []
    for number, order in enumerate(orders, 1):
        try:
            plan = environment.compile_in(directory, order)
        except environment.CompilerError as error:
            found.append((order, str(error)))
            say(f"{number}/{len(orders)} {order}: failed\n{error}")
        else:
            found.append((order, plan))
            size, seconds = plan.temp_bytes / MIB, plan.compile_seconds
            say(f"{number}/{len(orders)} {order}: {size:.1f} MiB, compiled in {seconds} s")
    return found


def tables(found: Found, versions: dict[str, str], problem: Problem, with_goals: bool) -> str:
    """The tables as Markdown, under a line that says what they hold for."""
    plans: dict[Key, Plan | str] = {order.key: plan for order, plan in found}
    head = (
        f"{datetime.date.today()}, {', '.join(f'{name} {version}' for name, version in versions.items())}; "
        f"N={problem.tokens:,} tokens on each device, D={problem.width:,}, V={problem.vocab:,}, bfloat16."
    )
    if any(order.tile for order, _ in found):
        return f"{head}\n\n{tiles_table(found)}\n"
    parts = [head, plans_table(plans)]
    if with_goals:
        parts.append(goals_table(goals({key: plan for key, plan in plans.items() if isinstance(plan, Plan)})))
    return "\n\n".join(parts) + "\n"


def as_json(found: Found, versions: dict[str, str]) -> dict[str, Any]:
    """All that was found."""
    results = [
        {**dataclasses.asdict(order), "keep": None, "problem": order.problem._asdict()}
        | ({"failed": plan} if isinstance(plan, str) else dataclasses.asdict(plan))
        for order, plan in found
    ]
    return {"date": datetime.date.today().isoformat(), "versions": versions, "results": results}


def usable(targets: Sequence[str], directory: pathlib.Path) -> list[str]:
    """The targets that can be compiled for; says what is missing for the others."""
    reasons = {platform: environment.missing(directory, platform) for platform in environment.PACKAGES}
    for target in targets:
        if reason := reasons[DEVICES[target].platform]:
            say(f"skipped {target}: {reason}")
    return [target for target in targets if not reasons[DEVICES[target].platform]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 1 if nothing could be compiled, or something failed to."""
    options = parse_arguments(arguments)
    if options.make_env is not None:
        environment.make(options.make_env)
        return 0
    options.targets = usable(options.targets, options.env)
    if not options.targets:
        return 1
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    orders, versions = orders_of(options), environment.installed(options.env)
    found = compile_all(orders, options.env)
    text = tables(found, versions, orders[0].problem, with_goals=not options.quick)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(found, versions), indent=1) + "\n")
    return int(any(isinstance(plan, str) for _, plan in found))


if __name__ == "__main__":
    sys.exit(main())
