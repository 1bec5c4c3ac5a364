"""Sampling with a whole model on a CPU: kljax against Tunix's sampler and `generate` of transformers.

    python -m benchmarks.rollout --make-envs ENVS      once; Tunix and transformers, in environments of their own
    python -m benchmarks.rollout --envs ENVS --json PATH --markdown PATH

All have the same weights. Before anything is timed, their log-probs of the same sequences are compared; the command
fails if they differ. Then each contender, in a process of its own, completes the same prompts once a round while the
others wait. A missed target does not fail the command.
"""

import sys

from benchmarks.suites.model import suite

report, main = suite.command("rollout", "rollout", __doc__, ("kljax", "tunix", "transformers"))

if __name__ == "__main__":
    sys.exit(main())
