"""`python -m kljax COMMAND`. A command is the module `kljax.tools.COMMAND.command`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import kljax

# In the order of --help.
COMMANDS = ("systems", "audit", "parity")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code, 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(prog="python -m kljax", description="KL regularisation for RL post-training.")
    parser.add_argument("--version", action="version", version=f"kljax {kljax.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"kljax.tools.{name}.command")
        summary = (module.__doc__ or "").partition("\n")[0].partition(": ")[2]
        subparser = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run, option=None)
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    arguments, unknown = parser.parse_known_args(argv)
    # The flag of another system is what `systems` is asked for.
    if arguments.command == "systems" and len(unknown) == 1 and unknown[0].startswith("--"):
        arguments.option = unknown[0]
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough; Python would complain again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
