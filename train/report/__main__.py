"""`python -m train.report RUN [OTHER]`: the page of a run, one HTML file with curves, rollouts and tokens."""

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train.config.errors import UserError
from train.config.storage import is_address
from train.process.console import check_output, make_parser, run_command, write_file
from train.storage.paths import stored_argument

if TYPE_CHECKING:
    from train.report.page import ShownDump
    from train.report.runs import ShownRun

EXAMPLES = """\
examples:
  python -m train.report runs/quickstart --open            # writes runs/quickstart/report.html, and opens it
  python -m train.report runs/first runs/second            # two runs side by side, with their config difference
  python -m train.report token_exports --output page.html  # a token export of prime-rl (JSON lines)
  python -m train.report before.npz after.npz              # two dumps of `kljax parity`, with the causes named
"""
DUMPS = (".npz", ".safetensors")


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    command = make_parser("train.report", "Write the page of a run: one HTML file that needs no network.", EXAMPLES)
    command.add_argument(
        "what", metavar="RUN", type=stored_argument, help="a run, an export of prime-rl, or a dump of a batch"
    )
    command.add_argument(
        "other", metavar="OTHER", type=stored_argument, nargs="?", help="another of the same kind, to compare"
    )
    command.add_argument(
        "--output", metavar="FILE", type=stored_argument, help="the file; report.html in the run if left out"
    )
    command.add_argument("--open", action="store_true", help="open the page in a browser")
    command.add_argument(
        "--rollouts", metavar="N", type=int, default=2000, help="most rollouts of a run on the page (%(default)s)"
    )
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is 0, or 2 for an error that the user can fix."""
    options = parser().parse_args(arguments)
    return run_command(lambda: write_page(options))


def write_page(options: argparse.Namespace) -> None:
    """Reads what the command line names, and writes the page.

    Raises:
      UserError: something cannot be read or written.
    """
    # Imported late, so that an error on the command line shows before JAX starts.
    from train.report.page import render

    paths = [_readable(path) for path in (options.what, options.other) if path is not None]
    if options.rollouts < 1:
        raise UserError(f"--rollouts: got {options.rollouts}, expected at least 1")
    title = " and ".join(path.resolve().name for path in paths)
    dumps = [path.suffix in DUMPS for path in paths]
    if any(dumps) and not all(dumps):
        raise UserError(f"got {' and '.join(map(str, paths))}; compare two runs, or two dumps")
    output = options.output or (options.what / "report.html" if options.what.is_dir() else Path("report.html"))
    check_output("--output", output, inputs=paths)
    page = render(title, [], _replayed(paths)) if all(dumps) else render(title, _read(paths, options.rollouts))
    write_file("--output", output, page)
    print(output)
    if options.open:
        webbrowser.open(output.resolve().as_uri())


def _readable(path: Path) -> Path:
    """Returns a path that can be read: a dump, or an export of another system, in a store is copied."""
    from train.storage.copies import local_copy

    is_run = is_address(path) and any((path / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    return path if is_run else local_copy(path, "RUN")


def _read(paths: Sequence[Path], rollouts: int) -> list["ShownRun"]:
    from train.report.runs import read_run

    return [read_run(path, rollouts=rollouts) for path in paths]


def _replayed(paths: Sequence[Path]) -> list["ShownDump"]:
    """Replays dumps with `kljax parity`, which names the cause of each difference."""
    import jax

    from kljax.tools.parity.command import compare
    from train.report.page import ShownDump

    try:
        with jax.enable_x64(True):
            return [ShownDump(path.name, compare(path)) for path in paths]
    except (ValueError, TypeError, OSError) as error:
        raise UserError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
