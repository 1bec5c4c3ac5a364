"""Time and memory of the LM head: kljax against naive JAX, Tunix, TRL, verl and Liger.

    python -m benchmarks.head --make-torch-env ENV     once; PyTorch and the releases, in an environment of their own
    python -m benchmarks.head --torch-env ENV --json PATH --markdown PATH
    python -m benchmarks.head --torch-env ENV --device gpu --dtype bf16 --size 16384x4096x151936

Before the command times a contender, it compares its loss and gradients with those of the naive form; it fails if they
differ. All contenders run in the same rounds, PyTorch's in a second process. Temporary memory is the one that JAX's
compiler assigns. Peak memory is the growth of the resident set of a fresh process during one run (on a GPU, of the
memory that PyTorch allocates), less the gradients. A missed target does not fail the command.
"""

import os
import sys
from collections.abc import Sequence

import jax

from benchmarks.harness import cli
from benchmarks.harness.suite import run
from benchmarks.suites.head import forms, suite
from benchmarks.suites.head.problem import QUICK, QUICK_TILE, SIZES, Options, Size


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a contender failed or differs from the naive form."""
    parser = cli.race_parser("head", __doc__, "torch-env", rounds=5, quick=f"{QUICK}, two rounds, no peak memory")
    parser.add_argument("--size", action="append", type=cli.numbers("2048x1024x32768"), metavar="NxDxV",
                       help=f"tokens x width x vocabulary, repeatable; {' and '.join(map(str, SIZES))}")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="float32", help="of hidden states and head")
    parser.add_argument("--tile", type=cli.numbers("2048x1024"), metavar="NxV", help="in place of kljax's default")
    options = parser.parse_args(arguments)
    if options.make_torch_env is not None:
        suite.make_torch_env(options.make_torch_env)
        print(f"made; now: python -m benchmarks.head --torch-env {options.make_torch_env}")
        return 0
    try:
        forms.choose(options.device, options.contenders)
    except ValueError as error:
        parser.error(f"argument --contenders: {error}")
    if options.quick:
        options.rounds, options.tile = min(options.rounds, 2), options.tile or QUICK_TILE
    if options.device == "cpu":
        cli.limit_threads(options.threads)
    else:
        # PyTorch needs memory of the same GPU; JAX reads this when it starts the device.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if options.dtype == "float32":
            jax.config.update("jax_default_matmul_precision", "highest")  # the default of PyTorch
    shared = Options(options.device, options.dtype, options.threads, options.tile)
    sizes = [Size(*numbers) for numbers in options.size or ()] or ((QUICK,) if options.quick else SIZES)
    return run(suite.HeadSuite(shared), sizes, options, {"options": vars(shared)})


if __name__ == "__main__":
    sys.exit(main())
