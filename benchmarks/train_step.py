"""An RL step with a whole model on a CPU, rollout and update: kljax against Tunix's `GRPOLearner`.

    python -m benchmarks.train_step --make-envs ENVS   once; Tunix and transformers, in environments of their own
    python -m benchmarks.train_step --envs ENVS --json PATH --markdown PATH

Both do GRPO with a KL of 0.04 to the base (low_var_kl) and AdamW, from the same weights. Before anything is timed,
kljax does the first update of Tunix on Tunix's batch, and what the two change is compared; the command fails if they
differ. Peak memory is what the resident set grows by. A missed target is said, and is no failure of the command.
"""

import sys
from collections.abc import Sequence

from benchmarks._speed import command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    assert __doc__ is not None
    found = command.parser("python -m benchmarks.train_step", __doc__, ("kljax", "tunix"))
    return command.main(found.parse_args(arguments), found, "step")


if __name__ == "__main__":
    sys.exit(main())
