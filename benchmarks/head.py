"""Time and memory of the LM head: kljax against naive JAX, Tunix, TRL, verl and Liger. One command makes the table:

    python -m benchmarks.head --make-torch-env ENV     once; PyTorch and the releases, in an environment of their own
    python -m benchmarks.head --torch-env ENV --json PATH --markdown PATH
    python -m benchmarks.head --torch-env ENV --device gpu --dtype bf16 --size 16384x4096x151936

Every contender's loss and gradients are compared with the naive form's before it is timed; the command fails if one
differs. All are timed in the same rounds, PyTorch's in a second process. Temporary memory is what JAX's compiler
assigns. Peak memory is measured for every contender in a fresh process, as the growth of the resident set (on a GPU, of
what PyTorch has allocated) during one run, less the gradients. A missed target is said, and is no failure of the
command.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import _torch_env
from benchmarks._inputs import QUICK, QUICK_TILE, SIZES, Options, Size, parse_numbers

if TYPE_CHECKING:
    from benchmarks import _results


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.head", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--size", action="append", type=_size, metavar="NxDxV",
                       help=f"tokens x width x vocabulary, repeatable; {' and '.join(map(str, SIZES))}")  # fmt: skip
    found.add_argument("--rounds", type=int, default=5, help="0 compiles and compares, and measures memory only")
    found.add_argument("--contenders", type=_names, help="names separated by commas; their baselines come with them")
    found.add_argument("--torch-env", type=pathlib.Path, metavar="DIR", help="made with --make-torch-env")
    found.add_argument("--make-torch-env", type=pathlib.Path, metavar="DIR", help="make it, and do nothing else")
    found.add_argument("--torch-index", help="package index for PyTorch in place of PyPI, with --make-torch-env")
    found.add_argument("--quick", action="store_true", help=f"a smoke test: {QUICK}, two rounds, no peak memory")
    found.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    found.add_argument("--dtype", choices=("float32", "bf16"), default="float32", help="of hidden states and head")
    found.add_argument("--tile", type=_tile, metavar="NxV", help="in place of kljax's own")
    found.add_argument("--threads", type=int, default=2, help="of each process on the CPU; 0 leaves them as they are")
    found.add_argument("--no-peak", action="store_true", help="leave out the peak memory of fresh processes")
    found.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write everything that was measured")
    found.add_argument("--markdown", type=pathlib.Path, metavar="PATH", help="write the table, which is printed anyway")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; the status is 1 if a contender failed or disagrees."""
    options = parser().parse_args(arguments)
    if options.make_torch_env is not None:
        _torch_env.make(options.make_torch_env, options.torch_index)
        print(f"made; now: python -m benchmarks.head --torch-env {options.make_torch_env}")
        return 0
    _configure(options)
    # Only now: JAX reads the environment when it starts.
    from benchmarks import _report, _results, _rows

    try:
        _rows.choose_rows(options.device, options.contenders)
    except ValueError as error:
        parser().error(str(error))
    report, sizes = _measure(options)
    text = _report.markdown(report, sizes, options.device)
    print(text, end="")
    _write(options.markdown, text)
    _write(options.json, json.dumps(_report.as_json(report, sizes, options.device), indent=1) + "\n")
    wrong = [f"{m.size} {line}" for m in sizes for line in _results.errors(m, _rows.TOLERANCE[options.dtype])]
    for line in wrong:
        print(f"ERROR {line}", file=sys.stderr)
    return 1 if wrong else 0


def _configure(options: argparse.Namespace) -> None:
    """What must be said before JAX starts: threads, and that on a GPU PyTorch needs some of its memory."""
    if options.device == "gpu":
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    elif options.threads and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])


def _measure(options: argparse.Namespace) -> tuple[dict[str, Any], "list[_results.Measured]"]:
    """Everything, at every size: what the report says of all, and what was found at each."""
    import jax

    from benchmarks import _machine, _run

    if options.device == "gpu" and options.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")  # as PyTorch does unless it is told otherwise
    quick = options.quick
    shared = Options(
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        tile=QUICK_TILE if quick and options.tile is None else options.tile,
    )
    plan = _run.Plan(
        options=shared,
        rounds=min(options.rounds, 2) if quick else options.rounds,
        names=options.contenders,
        torch_env=options.torch_env,
        peak=not (quick or options.no_peak),
    )
    report: dict[str, Any] = {
        "machine": _machine.describe(jax.devices(options.device)[0]),
        "options": vars(shared),
        "rounds": plan.rounds,
        "versions": {},
    }
    before, sizes = _machine.load(), []
    for size in options.size or ((QUICK,) if quick else SIZES):
        with tempfile.TemporaryDirectory() as scratch:
            measured, versions = _run.measure(size, plan, pathlib.Path(scratch))
        sizes.append(measured)
        report["versions"] |= versions
    report["load"] = [before, _machine.load()]
    return report, sizes


def _write(path: pathlib.Path | None, text: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _size(text: str) -> Size:
    return Size(*_numbers(text, 3))


def _tile(text: str) -> tuple[int, int]:
    tokens, vocab = _numbers(text, 2)
    return tokens, vocab


def _numbers(text: str, count: int) -> tuple[int, ...]:
    try:
        return parse_numbers(text, count)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
