"""An RL step with a whole model on a CPU, rollout and update: kljax against Tunix's `GRPOLearner`.

    python -m benchmarks.train_step --make-envs ENVS   once; Tunix and transformers, in environments of their own
    python -m benchmarks.train_step --envs ENVS --json PATH --markdown PATH

Both do GRPO with a KL of 0.04 to the base (low_var_kl) and AdamW, from the same weights. Before anything is timed,
kljax does the first update of Tunix on Tunix's batch; the command fails if the effects differ. Peak memory is the
growth of the resident set. A missed target does not fail the command.
"""

import sys

from benchmarks.suites.model import suite

report, main = suite.command("step", "train_step", __doc__, ("kljax", "tunix"))

if __name__ == "__main__":
    sys.exit(main())
