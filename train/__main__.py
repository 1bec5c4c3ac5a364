"""`python -m train CONFIG [key=value ...] [--resume | --resume-or-start]`."""

import argparse
import sys
from collections.abc import Sequence

from train.config.explain import explain
from train.config.help import algorithm_help, field_help, overview, search_help
from train.config.load import load
from train.process.console import add_process_flags, joined_processes, make_parser, run_command, show_warnings
from train.process.interrupt import exit_with
from train.process.xla_flags import set_flags

EXAMPLES = """\
examples:
  python -m train configs/quickstart.yaml
  python -m train configs/quickstart.yaml name=weaker kl.loss.coef=1e-3 seed=1
  python -m train configs/quickstart.yaml 'loss={type: cispo, clip_high: 4.0}' advantage=rloo
  python -m train configs/quickstart.yaml lora.rank=8 'reference={source: step, step: 0}'
  python -m train configs/quickstart.yaml preset=trl/grpo kl.loss.coef=0.04 --explain
  python -m train configs/quickstart.yaml --resume
  python -m train configs/quickstart.yaml --coordinator 10.0.0.1:8476 --process 0 --processes 2
  python -m train --help kl.loss                   # the fields and algorithms with a word in them
"""


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    command = make_parser(
        "train",
        "Train a policy with KL regularisation by a YAML config.",
        f"{EXAMPLES}\n{field_help()}\n\n{algorithm_help()}",
    )
    command.add_argument("config", metavar="CONFIG", help="YAML file, or the name of a recipe, such as quickstart")
    command.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="dotted path of a field and its YAML value"
    )
    command.add_argument("--explain", action="store_true", help="print the algorithm and the origin of its fields")
    command.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint of the run")
    command.add_argument(
        "--resume-or-start", action="store_true", help="--resume if there is a run of this name, else start it"
    )
    add_process_flags(command)
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; without arguments lists the configs.

    The exit code is 0, 2 for an error that the user can fix, 3 for the guard, 75 for a lost process, 130 for Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        print(overview(), file=sys.stderr)
        return 2
    if arguments[0] in ("-h", "--help") and len(arguments) > 1:
        return run_command(lambda: print(search_help(arguments[1:])))
    options = parser().parse_intermixed_args(arguments)

    def command() -> int:
        loaded = load(options.config, options.overrides)
        if options.explain:
            show_warnings(loaded)
            print(explain(loaded))
            return 0
        if loaded.config.log.format == "json":
            from train.process.json_lines import write_json_lines

            write_json_lines()
        set_flags(loaded.config.xla_flags)
        with joined_processes(options):
            show_warnings(loaded)
            # Imported late, so that an error in the config shows before JAX starts.
            from train.run.run import run

            return run(loaded, resume=options.resume or (None if options.resume_or_start else False))

    return run_command(command)


if __name__ == "__main__":
    exit_with(main())
