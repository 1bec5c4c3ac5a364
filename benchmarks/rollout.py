"""Sampling with a whole model on a CPU: kljax against Tunix's sampler and `generate` of transformers.

    python -m benchmarks.rollout --make-envs ENVS      once; Tunix and transformers, in environments of their own
    python -m benchmarks.rollout --envs ENVS --json PATH --markdown PATH

All have the same weights, and their log-probs of the same sequences are compared before anything is timed; the command
fails if they differ. Then each, in a process of its own and while the others wait, completes the same prompts in every
round. A missed target is said, and is no failure of the command.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._report import _table as table
from benchmarks._sides import ROOT
from benchmarks._speed import command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    assert __doc__ is not None
    names = ("kljax", "tunix", "transformers")
    found = command.parser("python -m benchmarks.rollout", __doc__, names)
    found.add_argument("--no-long-tail", action="store_true", help="leave out the completions of all lengths")
    options = found.parse_args(arguments)
    return command.main(options, found, "rollout", None if options.quick or options.no_long_tail else _long_tail)


def _long_tail(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Continuous batching against batches that wait, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "found.json"
        run = [
            sys.executable,
            "-m",
            "benchmarks._speed.long_tail",
            "--rounds",
            str(options.rounds),
            "--json",
            str(path),
        ]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        subprocess.run(run, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(path.read_text())
    return {"long_tail": found}, long_tail_lines(found)


def long_tail_lines(found: Mapping[str, Any]) -> list[str]:
    """The long tail as Markdown."""
    names = {"continuous": "slots that are refilled", "static": "batches that wait"}
    rows = [
        [
            title,
            *(f"{found[name][key]:,.0f}" for key in ("tokens_per_second", "tokens_per_cpu_second", "steps")),
            f"{found[name]['occupancy']:.0%}",
        ]
        for name, title in names.items()
    ]
    clock, cpu = (found["gain"][f"tokens_per_{unit}"] for unit in ("second", "cpu_second"))
    verdict = "met" if cpu >= found["target"] else "missed"
    return [
        "",
        "### A long tail of lengths",
        "",
        *table(["kljax, 8 slots", "tokens/s", "tokens/CPU s", "decode steps", "busy slots"], rows),
        "",
        f"Refilled slots are faster by {cpu:.2f} in CPU seconds and {clock:.2f} by the clock; at least "
        f"{found['target']:g} is wanted: {verdict}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
