"""An RL step with a whole model on a CPU, rollout and update: kljax against Tunix's `GRPOLearner`.

    python -m benchmarks.train_step --make-envs ENVS   once; Tunix and transformers, in environments of their own
    python -m benchmarks.train_step --envs ENVS --json PATH --markdown PATH

Both do GRPO with a KL of 0.04 to the base (low_var_kl) and AdamW, from the same weights. Before anything is timed,
kljax does the first update of Tunix on Tunix's batch; the command fails if the effects differ. Peak memory is the
growth of the resident set. A missed target does not fail the command.
"""

import functools
import sys

from benchmarks.harness import cli
from benchmarks.suites.model import suite

report = functools.partial(suite.report, part="step")
main = cli.command(
    "train_step", __doc__, functools.partial(suite.measure, part="step"), report, *suite.options_of(("kljax", "tunix"))
)

if __name__ == "__main__":
    sys.exit(main())
