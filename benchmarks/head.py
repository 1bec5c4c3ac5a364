"""Time and memory of the LM head: kljax against naive JAX, Tunix, TRL, verl and Liger.

    python -m benchmarks.head --make-torch-env ENV     once; PyTorch and the releases, in an environment of their own
    python -m benchmarks.head --torch-env ENV --json PATH --markdown PATH
    python -m benchmarks.head --torch-env ENV --device gpu --dtype bf16 --size 16384x4096x151936

Before the command times a contender, it compares its loss and gradients with those of the naive form; it fails if they
differ. All contenders run in the same rounds, PyTorch's in a second process. Temporary memory is the one that JAX's
compiler assigns. Peak memory is the growth of the resident set of a fresh process during one run (on a GPU, of the
memory that PyTorch allocates), less the gradients. A missed target does not fail the command.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from benchmarks.harness import cli
from benchmarks.suites.head.problem import QUICK, QUICK_TILE, SIZES, Options, Size


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = cli.make_parser("head", __doc__)
    parser.add_argument("--size", action="append", type=cli.numbers("2048x1024x32768"), metavar="NxDxV",
                       help=f"tokens x width x vocabulary, repeatable; {' and '.join(map(str, SIZES))}")  # fmt: skip
    parser.add_argument("--torch-env", type=pathlib.Path, metavar="DIR", help="made with --make-torch-env")
    parser.add_argument("--make-torch-env", type=pathlib.Path, metavar="DIR", help="make it, and measure nothing")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32", help="of hidden states and head")
    parser.add_argument("--tile", type=cli.numbers("2048x1024"), metavar="NxV", help="in place of kljax's default")
    cli.add_race_options(parser, rounds=5, quick=f"{QUICK}, two rounds, no peak memory")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a contender failed or differs from the naive form."""
    options = make_parser().parse_args(arguments)
    _configure(options)
    # JAX reads the environment at its import.
    import jax

    from benchmarks.harness import machine
    from benchmarks.harness.results import failures
    from benchmarks.suites.head import forms, report, suite

    if options.make_torch_env is not None:
        suite.make_torch_env(options.make_torch_env, options.torch_index)
        print(f"made; now: python -m benchmarks.head --torch-env {options.make_torch_env}")
        return 0
    try:
        forms.choose(options.device, options.contenders)
    except ValueError as error:
        make_parser().error(f"argument --contenders: {error}")
    if options.device == "gpu" and options.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")  # the default of PyTorch
    shared = Options(options.device, options.dtype, options.threads, options.tile)
    result = machine.begin(jax.devices(options.device)[0], rounds=options.rounds, options=vars(shared))
    sizes = []
    for size in [Size(*numbers) for numbers in options.size or ()] or ((QUICK,) if options.quick else SIZES):
        measured, versions = suite.measure(size, options, shared)
        sizes.append(measured)
        result["versions"] |= versions
    machine.end(result)
    text = report.markdown(result, sizes, options.device)
    result["sizes"] = [
        {**one.as_json(), "targets": [check.as_json() for check in report.checks(one, options.device)]} for one in sizes
    ]
    tolerances = dict.fromkeys(("loss", "gradients"), forms.TOLERANCE[options.dtype])
    wrong = [f"{one.size} {line}" for one in sizes for line in failures(one.results, tolerances)]
    return cli.finish(options, text, result, wrong)


def _configure(options: argparse.Namespace) -> None:
    """Applies --quick, and sets threads and memory of the device before JAX starts."""
    if options.quick:
        options.rounds, options.tile = min(options.rounds, 2), options.tile or QUICK_TILE
    if options.device == "gpu":
        # PyTorch needs memory of the same GPU.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    else:
        cli.limit_threads(options.threads)


if __name__ == "__main__":
    sys.exit(main())
