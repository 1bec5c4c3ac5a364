"""Helpers of the commands: exit codes, messages without a traceback, a quiet orbax, freed memory that is kept."""

import argparse
import gc
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from train.config.errors import UserError, leave_warnings_to_another_process, warn
from train.config.fields import known_fields
from train.config.installation import as_installed
from train.config.load import LoadedConfig
from train.config.plan import forget_plans
from train.config.usual_names import usual_field
from train.process.allocator import keep_freed_memory
from train.process.disk_problem import handle_thread_errors
from train.process.error_exit import ending_alone, known_ending
from train.process.interrupt import ending_at_once
from train.process.streams import guarded_streams

JOIN_SECONDS = 60.0
"""All processes of a run join one another within this time."""
LONGEST_JOIN_SECONDS = 86_400.0


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Hides orbax's messages below an error inside the block; the trainer reports these events itself."""
    logger = logging.getLogger("absl")
    before = logger.level
    # A filter that is there already is not added again, and stays: threads of orbax outlive the block.
    logger.addFilter(handle_thread_errors().filter)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Lets Python search for unused cycles of objects rarely inside the block.

    Tracing makes many objects that live long: by default the searches take over a quarter of the time of a short run.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def show_warnings(loaded: LoadedConfig) -> None:
    """Prints the warnings of a config; several processes have joined by then, so that one of them does."""
    for warning in loaded.warnings:
        warn(warning)


def make_parser(module: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Makes the parser of `python -m MODULE`, with `--version`; the lines of the epilog are kept."""
    command = FieldParser(
        prog=as_installed(f"python -m {module}"),
        description=description,
        epilog=as_installed(epilog).replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--version", action=ShowVersion)
    return command


class FieldParser(argparse.ArgumentParser):
    """A parser that tells how to set a field which was written as a flag, `--kl.loss.coef 0.1`."""

    def error(self, message: str) -> NoReturn:
        """Ends the command with the usage and the message."""
        flag = re.match(r"unrecognized arguments: --([\w.-]+)[= ]?(\S*)", message)
        if flag is not None:
            name = flag[1].replace("-", "_")
            path = name if name in known_fields() else usual_field(name)
            if path is not None:
                message += f"; a field is set without dashes: {path}={flag[2] or 'VALUE'}"
        # parse_intermixed_args counts the arguments that may be left out among the required ones.
        super().error(re.sub(r"(are required: .*), key=value$", r"\1", message))


def add_process_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags of a run in several processes, which `join_processes` reads."""
    group = command.add_argument_group(
        "several processes (docs/pods.md); TPU pods, SLURM, Open MPI and launchers on Kubernetes need none"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, the same in every process")
    group.add_argument("--process", metavar="I", type=int, help="number of this process, from 0")
    group.add_argument("--processes", metavar="N", type=int, help="number of processes")
    group.add_argument(
        "--join-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=JOIN_SECONDS,
        help=f"end if another process has not joined by then (default {JOIN_SECONDS:g})",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_JOIN_SECONDS:
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds above 0, at most {LONGEST_JOIN_SECONDS:g}")
    return seconds


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Makes the type of a flag that takes an integer from `least` to `most`; None: to any."""
    expected = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"got {text}, expected {expected}")
        return number

    return parse


def join_processes(options: argparse.Namespace) -> None:
    """Joins the other processes of the run, if there are any, before a device is used.

    Raises:
      UserError: the flags do not fit, or the others cannot be reached.
    """
    # Imported late, so that an error in the config shows before JAX starts.
    from train.distributed import peers

    others = peers.peers_of(options.coordinator, options.process, options.processes)
    peers.start(others, join_seconds=options.join_timeout)
    if not peers.is_leader():
        leave_warnings_to_another_process()
        logging.getLogger("train").setLevel(logging.ERROR)


@contextmanager
def joined_processes(options: argparse.Namespace) -> Iterator[None]:
    """Joins the other processes of the run, if there are any, watches them inside the block, and leaves them."""
    join_processes(options)
    from train.distributed import peer_watch, peers

    try:
        with peer_watch.watching(), ending_alone():
            yield
    finally:
        peers.stop()


def check_output(option: str, path: Path, *, inputs: Sequence[Path] = ()) -> None:
    """Checks that a command may write a file, so that no work is done in vain; `inputs` are files that it reads.

    Raises:
      UserError: naming the option: the file cannot be written, is an input, or is a file of a run.
    """
    # Imported late: the library loads JAX.
    from kljax import _files

    try:
        _files.check_output(path, inputs, option=option)
    except ValueError as error:
        raise UserError(str(error)) from error


def check_output_directory(option: str, path: Path) -> None:
    """Raises `UserError` naming the option unless a directory is there, outside of the files of a run."""
    from kljax import _files

    if not path.is_dir():
        raise UserError(f"{option}: there is no directory {path}")
    try:
        _files.check_outside_of_runs(path, option=option)
    except ValueError as error:
        raise UserError(str(error)) from error


def write_file(option: str, path: Path, text: str) -> None:
    """Writes a file that `check_output` allows; raises `UserError` naming the option if the system refuses."""
    from kljax import _files

    try:
        _files.write_output(path, text)
    except OSError as error:
        raise UserError(f"{option}: cannot write {path}: {error.strerror}") from error


def run_command(command: Callable[[], int | None]) -> int:
    """Runs a command; returns its exit code or 0, 130 for a signal.

    An error that the user can fix gives its own code: 2, or another of its class, such as 3 of the guard. So does
    SystemExit, whatever its code: 0 means that the command came to its end.
    Signals are Ctrl-C, SIGTERM and SIGHUP. A standard output that cannot be written does not end the command.
    """
    keep_freed_memory()
    forget_plans()
    hook = handle_thread_errors()
    hook.problem = None
    hook.ending = False
    with guarded_streams(), ending_at_once() as ending:
        try:
            with quiet_orbax(), rare_collections():
                code = command() or 0
            ending.over = True
            if hook.problem is not None:
                warn(hook.problem)
            return code
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            known = known_ending(error)
            if known is None:
                raise
            ending.over = isinstance(error, KeyboardInterrupt)
            # Threads of orbax that the end cuts short have nothing to say.
            hook.ending = not isinstance(error, UserError)
            text, code = known
            print(text, file=sys.stderr)
            return code


class ShowVersion(argparse.Action):
    """The `--version` flag of a command. The library is imported only when the flag is used: it loads JAX."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Prints the version of the package, which the trainer shares with the library."""
        import kljax

        print(f"kljax {kljax.__version__}")
        parser.exit()
