"""Time and memory of the LM head: kljax against naive JAX, Tunix, TRL, verl and Liger.

    python -m benchmarks.head --make-torch-env ENV     once; PyTorch and the releases, in an environment of their own
    python -m benchmarks.head --torch-env ENV --json PATH --markdown PATH
    python -m benchmarks.head --torch-env ENV --device gpu --dtype bf16 --size 16384x4096x151936

Before the command times a contender, it compares its loss and gradients with the naive form's; it fails if they
differ. All contenders run in the same rounds, PyTorch's in a second process. Temporary memory is the one that JAX's
compiler assigns. Peak memory is the growth of the resident set of a fresh process during one run (on a GPU, of the
memory that PyTorch allocates), less the gradients. A missed target does not fail the command.
"""

import argparse
import functools
import os
import sys
from typing import Any

import jax

from benchmarks.harness import cli, machine
from benchmarks.suites.head import forms, suite
from benchmarks.suites.head.problem import DTYPE, QUICK, QUICK_TILE, SIZES, HeadOptions, Size


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.make_torch_env is not None:
        suite.make_torch_env(options.make_torch_env)
        raise cli.EndError(f"made; now give --torch-env {options.make_torch_env}", status=0)
    forms.choose(options.device, options.contenders)
    if options.quick:
        options.rounds, options.tile = min(options.rounds, 2), options.tile or QUICK_TILE
    if options.device == "cpu":
        cli.limit_threads(options.threads)
    else:
        # PyTorch needs memory of the same GPU; JAX reads this when it starts the device.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if options.dtype == "float32":
            jax.config.update("jax_default_matmul_precision", "highest")  # the default of PyTorch
    shared = HeadOptions(options.device, options.dtype, options.threads, options.tile)
    torch = functools.partial(suite.torch_in, options.torch_env, shared)
    fields = machine.conditions(options.device) | {"rounds": options.rounds, "options": vars(shared), "sizes": []}
    for size in [Size(*numbers) for numbers in options.size or ()] or ((QUICK,) if options.quick else SIZES):
        chosen = (shared, size, options.contenders, options.rounds)
        measured, versions = suite.race_forms(*chosen, torch, fresh=not options.quick)
        fields["versions"] |= versions
        fields["sizes"].append(measured.as_json(suite.checks(measured, shared.device)))
    return fields


main = cli.command(
    "head",
    __doc__,
    _measure,
    suite.report,
    *cli.race_options("torch-env", rounds=5, quick=f"{QUICK}, two rounds, no peak memory"),
    cli.option("--contenders", type=cli.some_of(forms.TITLES), metavar="NAMES", help="names separated by commas"),
    cli.option("--size", action="append", type=cli.numbers("2048x1024x32768"), metavar="NxDxV",
               help=f"tokens x width x vocabulary, repeatable; {' and '.join(map(str, SIZES))}"),
    cli.option("--device", choices=("cpu", "gpu"), default="cpu"),
    DTYPE,
    cli.option("--tile", type=cli.numbers("2048x1024"), metavar="NxV", help="in place of kljax's default"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
