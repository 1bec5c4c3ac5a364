"""An RL step with a whole model on a CPU, rollout and update: kljax against Tunix's `GRPOLearner`.

    python -m benchmarks.train_step --make-envs ENVS   once; Tunix and transformers, in environments of their own
    python -m benchmarks.train_step --envs ENVS --json PATH --markdown PATH

Both do GRPO with a KL of 0.04 to the base (low_var_kl) and AdamW, from the same weights. Before anything is timed,
kljax does the first update of Tunix on Tunix's batch; the command fails if the effects differ. Peak memory is the
growth of the resident set. A missed target does not fail the command. A profile of kljax's update follows.
"""

import argparse
import sys
from typing import Any

from benchmarks.harness import cli
from benchmarks.harness.report import Report
from benchmarks.suites.model import profile, suite


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    return suite.measure(options, "step") | profile.measure(options)


def report(fields: dict[str, Any]) -> Report:
    """Makes the report of a race, before the profile."""
    return suite.report(fields, "step", [profile.report(fields)])


main = cli.command("train_step", __doc__, _measure, report, *suite.options_of(("kljax", "tunix")))

if __name__ == "__main__":
    sys.exit(main())
