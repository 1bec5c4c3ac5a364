"""Sampling with a whole model on a CPU: kljax against Tunix's sampler and `generate` of transformers.

    python -m benchmarks.rollout --make-envs ENVS      once; Tunix and transformers, in environments of their own
    python -m benchmarks.rollout --envs ENVS --json PATH --markdown PATH
    python -m benchmarks.rollout --contenders kljax --against CHECKOUT

All have the same weights. Before anything is timed, their log-probs of the same sequences are compared; the command
fails if they differ. Then each contender, in a process of its own, completes the same prompts once a round while the
others wait. A missed target does not fail the command. Completions of very different lengths follow.

With `--against`, another checkout of this repository races too: targets say whether this one is more than 3 % slower.
"""

import sys
from collections.abc import Sequence

from benchmarks.suites.model import long_tail, suite


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = suite.make_parser("rollout", __doc__, ("kljax", "tunix", "transformers"))
    parser.add_argument("--no-long-tail", action="store_true", help="leave out the completions of all lengths")
    options = parser.parse_args(arguments)
    return suite.main(options, parser, "rollout", None if options.quick or options.no_long_tail else long_tail.section)


if __name__ == "__main__":
    sys.exit(main())
