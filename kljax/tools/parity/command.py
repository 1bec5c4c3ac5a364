"""`python -m kljax parity`: says why another framework's update differs from kljax's."""

import argparse
import json
import pathlib
import sys

import jax

from kljax._files import check_output, local_file, write_output
from kljax.tools.parity import report
from kljax.tools.parity.dump import open_dump
from kljax.tools.parity.recipe import read_recipe
from kljax.tools.parity.replay import Replay
from kljax.tools.parity.report import ParityReport
from kljax.tools.parity.search import make_report
from kljax.tools.parity.stages import STAGES

EXIT_CODES = """\
exit code: 0 if all agrees that the header has a section for; 1 if a field differs, an invariant is broken, or a stage
that the header claims could not be compared; 2 for a mistake in the arguments or the file. docs/parity.md has the
schema and recorders for nine systems.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = "Replays a recorded batch stage by stage and names the cause of each difference."
    parser.epilog = EXIT_CODES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "dump", type=local_file, metavar="DUMP", help="an .npz or safetensors file with named arrays and a JSON header"
    )
    parser.add_argument("--system", metavar="NAME", help="the system whose names the header uses; overrides its own")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", type=local_file, metavar="HTML", help="write the report as a page, too")


def run(args: argparse.Namespace) -> int:
    """Compares a dump and prints the report, as text or JSON; with `--html`, writes a page too.

    Returns:
      The exit code, as `EXIT_CODES` says; of 2, the error is on stderr.
    """
    page = None if args.html is None else pathlib.Path(args.html)
    try:
        if page is not None:
            check_output(page, inputs=[pathlib.Path(args.dump)], option="--html")
        with jax.enable_x64(True):
            result = compare(args.dump, system=args.system)
        if page is not None:
            write_output(page, report.as_html(result, f"Parity of {pathlib.Path(args.dump).name}"))
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.as_json(result), indent=2) if args.json else report.as_text(result))
    return 0 if result.passes else 1


def compare(path: str | pathlib.Path, *, system: str | None = None) -> ParityReport:
    """Opens a dump, replays it and explains its differences; needs float64, see `jax.enable_x64`.

    Raises:
      ValueError: naming a field or a key of the header, as `open_dump` and `read_recipe`, or a refused setting.
    """
    dump = open_dump(path)
    return make_report(Replay(dump, read_recipe(dump, system), STAGES))
