"""Sampling with a whole model on a CPU: kljax against Tunix's sampler and `generate` of transformers.

    python -m benchmarks.rollout --make-envs ENVS      once; Tunix and transformers, in environments of their own
    python -m benchmarks.rollout --envs ENVS --json PATH --markdown PATH

All have the same weights, and their log-probs of the same sequences are compared before anything is timed; the command
fails if they differ. Then each, in a process of its own and while the others wait, completes the same prompts in every
round. A missed target is said, and is no failure of the command.
"""

import sys
from collections.abc import Sequence

from benchmarks._speed import command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    assert __doc__ is not None
    names = ("kljax", "tunix", "transformers")
    found = command.parser("python -m benchmarks.rollout", __doc__, names)
    return command.main(found.parse_args(arguments), found, "rollout")


if __name__ == "__main__":
    sys.exit(main())
