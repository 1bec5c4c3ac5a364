"""An RL step with a whole model on a CPU, rollout and update: kljax against Tunix's `GRPOLearner`.

    python -m benchmarks.train_step --make-envs ENVS   once; Tunix and transformers, in environments of their own
    python -m benchmarks.train_step --envs ENVS --json PATH --markdown PATH

Both do GRPO with a KL of 0.04 to the base (low_var_kl) and AdamW, from the same weights. Before anything is timed,
kljax does the first update of Tunix on Tunix's batch, and what the two change is compared; the command fails if they
differ. Peak memory is what the resident set grows by. A missed target is said, and is no failure of the command; what
the parts of kljax's update take is measured at the end.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks._sides import ROOT
from benchmarks._speed import command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    assert __doc__ is not None
    found = command.parser("python -m benchmarks.train_step", __doc__, ("kljax", "tunix"))
    found.add_argument("--no-profile", action="store_true", help="leave out where the time of kljax goes")
    options = found.parse_args(arguments)
    return command.main(options, found, "step", None if options.no_profile else _profile)


def _profile(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The parts of an update, in a process of its own."""
    run = [sys.executable, "-m", "benchmarks._speed.profile", "--rounds", str(options.rounds)]
    run += ["--quick"] if options.quick else [f"--vocab={vocab}" for vocab in options.vocab or ()]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    text = subprocess.run(run, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    lines = text.splitlines()
    return {"profile": lines}, lines


if __name__ == "__main__":
    sys.exit(main())
