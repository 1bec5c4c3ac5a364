"""Sampling with a whole model on a CPU: kljax against Tunix's sampler and `generate` of transformers.

    python -m benchmarks.rollout --make-envs ENVS      once; Tunix and transformers, in environments of their own
    python -m benchmarks.rollout --envs ENVS --json PATH --markdown PATH
    python -m benchmarks.rollout --limits 256,512,1024,2048

All have the same weights. Before anything is timed, their log-probs of the same sequences are compared; the command
fails if they differ. Then each contender, in a process of its own, completes the same prompts once a round while the
others wait. A missed target does not fail the command. Completions of very different lengths follow.

With `--limits`, only the price of a larger limit is measured, with completions of the same lengths.
"""

import sys
from collections.abc import Sequence

from benchmarks.harness import cli
from benchmarks.suites.model import limits, long_tail, suite


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = suite.make_parser("rollout", __doc__, ("kljax", "tunix", "transformers"))
    parser.add_argument("--no-long-tail", action="store_true", help="leave out the completions of all lengths")
    parser.add_argument(
        "--limits", type=cli.increasing, metavar="N,N", help="race limits of completions, and nothing else"
    )
    options = parser.parse_args(arguments)
    if options.limits is not None:
        return limits.main(options)
    return suite.main(options, parser, "rollout", None if options.quick or options.no_long_tail else long_tail.section)


if __name__ == "__main__":
    sys.exit(main())
