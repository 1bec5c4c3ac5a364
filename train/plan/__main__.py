"""`python -m train.plan CONFIG [key=value ...] --topology v5p:4x4x4`: the programs of a step on hardware elsewhere."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from train.config.errors import UserError
from train.config.installation import recipe_path
from train.config.load import LoadedConfig, fill_mesh, load
from train.config.mesh import AXES, REMAINING, describe_mesh
from train.config.storage import local_argument
from train.plan.compiler.topology import EXAMPLES, Topology, check_compiler, load_compilers, parse_topology
from train.process.console import (
    check_output,
    check_output_directory,
    make_parser,
    run_command,
    show_warnings,
    write_file,
)
from train.process.interrupt import exit_with
from train.process.xla_flags import PLATFORM_EXTRAS, add_flags

if TYPE_CHECKING:
    from rich.console import Console

    from train.plan.report import HardwareReport

DOES_NOT_FIT = 1
"""The exit code if the config, or every candidate of a search, needs more memory than a device has."""
WIDTH = 160
"""Columns of the tables where standard output is no terminal."""
EPILOG = """\
examples:
  python -m train.plan configs/gsm8k_qwen3_8b_v5p64.yaml --topology v5p:4x4x4
  python -m train.plan configs/gsm8k_qwen3_8b_v5p64.yaml --topology v5p:4x4x4 --slices 2 --json plan.json
  python -m train.plan configs/math_llama3_8b_h100x8.yaml --topology h200:8 optim.micro_batches=16
  python -m train.plan configs/math_llama3_8b_h100x8.yaml --topology h200:8 --search
"""


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    command = make_parser(
        "train.plan",
        "Compile the programs of a config for hardware that is not here: does it fit, and what does it do?",
        EPILOG,
    )
    add = command.add_argument
    add("config", metavar="CONFIG", help="YAML file, or the name of a recipe")
    add("overrides", metavar="key=value", nargs="*", help="dotted path of a field and its YAML value")
    add("--topology", metavar="NAME", required=True, help=EXAMPLES)
    add("--slices", metavar="N", type=int, default=1, help="equal slices, connected by a network")
    add("--json", metavar="FILE", type=local_argument, help="also write all numbers")
    add("--markdown", metavar="FILE", type=local_argument, help="also write the tables")
    add(
        "--keep",
        metavar="DIR",
        type=local_argument,
        help="also write the compiled programs and their buffer assignments",
    )
    add("--search", action="store_true", help="try meshes, micro-batches and remat, and print the best three that fit")
    add("--candidates", metavar="N", type=int, default=8, help="the most that --search compiles")
    add("--full-effort", action="store_true", help="compile as a run does, which takes several times longer")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is 0, 1 if nothing fits, 2 for an error that the user can fix."""
    options = parser().parse_intermixed_args(arguments)
    return run_command(lambda: show(options))


def show(options: argparse.Namespace) -> int:
    """Plans, prints the tables, and writes the files that are asked for.

    Raises:
      UserError: something cannot be read, does not exist or does not fit the topology.
    """
    topology = parse_topology(options.topology, options.slices)
    _check_outputs(options)
    loaded = config_on_slices(options.config, options.overrides, topology, any_mesh=options.search)
    show_warnings(loaded)
    check_compiler(topology)
    if loaded.config.xla_flags == "auto":
        add_flags(os.environ, PLATFORM_EXTRAS[topology.device.platform])
    load_compilers()
    # Imported late, so that an error on the command line shows before JAX starts.
    from train.plan.compiler.lowering import LEAST_EFFORT
    from train.plan.report import markdown
    from train.plan.search import best, plan_config
    from train.run.display import default_console, summary_text

    console = default_console()
    effort = None if options.full_effort else LEAST_EFFORT
    console.width = console.width if console.is_terminal else WIDTH

    def tell(line: str) -> None:
        console.print(line, soft_wrap=True)

    if options.search:
        pairs = best(loaded.source, options.overrides, topology, most=options.candidates, effort=effort, tell=tell)
        if not pairs:
            tell("none of these fits; raise --candidates, or take a larger topology")
        plans = [(candidate.overrides, plan) for candidate, plan in pairs]
    else:
        plan = plan_config(loaded.config, topology, effort=effort, keep=options.keep, tell=_tell_progress)
        plans = [(tuple(options.overrides), plan)]
    for overrides, plan in plans:
        if options.search:
            tell(f"\n{' '.join(overrides)}")
        print_report(console, plan, brief=options.search)
    if options.json is not None:
        described = [{"overrides": list(overrides), **plan.to_json()} for overrides, plan in plans]
        write_file("--json", options.json, summary_text({"config": str(options.config), "plans": described}))
    if options.markdown is not None:
        write_file("--markdown", options.markdown, "\n".join(markdown(plan) for _, plan in plans))
    return 0 if any(plan.fits for _, plan in plans) else DOES_NOT_FIT


def print_report(console: "Console", hardware: "HardwareReport", *, brief: bool = False) -> None:
    """Prints the answer and the tables of a report; `brief` leaves out exchanges and buffers."""
    from rich.table import Table

    from train.plan.report import summary, tables

    for line in summary(hardware):
        console.print(line, soft_wrap=True)
    for title, header, rows in tables(hardware)[: 2 if brief else None]:
        table = Table(*header, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def config_on_slices(path: str, overrides: Sequence[str], topology: Topology, *, any_mesh: bool) -> LoadedConfig:
    """Loads a config whose mesh has all devices of a topology; that of one slice is repeated on the others.

    Args:
      path: the config.
      overrides: of the command line.
      topology: the hardware.
      any_mesh: accepts any mesh, for a search.

    Raises:
      UserError: the mesh has other slices than the topology, or another size.
    """
    loaded = load(path, overrides)
    mesh = loaded.config.mesh
    slices = topology.slices
    if any_mesh:
        return loaded
    if slices > 1 and mesh.slices == 1:
        size = getattr(mesh, mesh.slice_axis)
        size = size if size == REMAINING else size * slices
        loaded = load(path, [*overrides, f"mesh.slices={slices}", f"mesh.{mesh.slice_axis}={size}"])
    loaded = dataclasses.replace(loaded, config=fill_mesh(loaded.config, topology.size))
    mesh = loaded.config.mesh
    if mesh.slices != slices:
        raise UserError(f"mesh.slices: got {mesh.slices}, but --slices is {slices}; set both to the same")
    size = mesh.parts().count
    if size != topology.size:
        sizes = describe_mesh(mesh.model_dump(include=set(AXES)))
        raise UserError(
            f"mesh: {sizes} has {size} devices, but {topology} has {topology.size}; set the mesh to as many, or let "
            "--search find one"
        )
    return loaded


def _tell_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_outputs(options: argparse.Namespace) -> None:
    """Raises `UserError` for a file that cannot be written."""
    for name in ("json", "markdown"):
        if (file := getattr(options, name)) is not None:
            check_output(f"--{name}", file, inputs=[recipe_path(options.config)])
    if options.keep is not None:
        check_output_directory("--keep", options.keep)
    if options.candidates < 1:
        raise UserError(f"--candidates: got {options.candidates}, expected at least 1")


if __name__ == "__main__":
    exit_with(main())
