"""`python -m train CONFIG [key=value ...] [--resume]`."""

import argparse
from collections.abc import Sequence

from train.config.explain import explain
from train.config.help import algorithm_help, field_help
from train.run.console import ShowVersion, add_process_flags, join_processes, load_config, run_command
from train.run.interrupt import exit_with

EXAMPLES = """\
examples:
  python -m train configs/quickstart.yaml
  python -m train configs/quickstart.yaml name=weaker kl.loss.coef=1e-3 seed=1
  python -m train configs/quickstart.yaml 'loss={type: cispo, clip_high: 4.0}' advantage=rloo
  python -m train configs/quickstart.yaml lora.rank=8 'reference={source: step, step: 0}'
  python -m train configs/quickstart.yaml preset=trl/grpo --explain
  python -m train configs/quickstart.yaml --resume
  python -m train configs/quickstart.yaml --coordinator 10.0.0.1:8476 --process 0 --processes 2
"""


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    command = argparse.ArgumentParser(
        prog="python -m train",
        description="Train a policy with KL regularisation by a YAML config.",
        epilog=f"{EXAMPLES}\n{field_help()}\n\n{algorithm_help()}".replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/quickstart.yaml")
    command.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="dotted path of a field and its YAML value"
    )
    command.add_argument("--explain", action="store_true", help="print the algorithm and the origin of its fields")
    command.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint of the run")
    command.add_argument("--version", action=ShowVersion)
    add_process_flags(command)
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is 0, 2 for an error that the user can fix, 3 for the guard, 130 for Ctrl-C."""
    options = parser().parse_intermixed_args(arguments)

    def command() -> int:
        loaded = load_config(options.config, options.overrides)
        if options.explain:
            print(explain(loaded))
            return 0
        join_processes(options)
        # Imported late, so that an error in the config shows before JAX starts.
        from train.run.run import run

        return run(loaded, resume=options.resume)

    return run_command(command)


if __name__ == "__main__":
    exit_with(main())
