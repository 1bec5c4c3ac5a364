"""Sampling with a whole model on a CPU: kljax against Tunix's sampler and `generate` of transformers.

    python -m benchmarks.rollout --make-envs ENVS      once; Tunix and transformers, in environments of their own
    python -m benchmarks.rollout --envs ENVS --json PATH --markdown PATH
    python -m benchmarks.rollout --limits 256,512,1024,2048

All have the same weights. Before anything is timed, their log-probs of the same sequences are compared; the command
fails if they differ. Then each contender, in a process of its own, completes the same prompts once a round while the
others wait. A missed target does not fail the command. Completions of very different lengths follow.

With `--limits`, only the price of a larger limit is measured, with completions of the same lengths.
"""

import argparse
import sys

from benchmarks.harness import cli
from benchmarks.harness.report import Report
from benchmarks.suites.model import limits, long_tail, suite


def _report(options: argparse.Namespace) -> Report:
    if options.limits is not None:
        return limits.report(options)
    return suite.report(options, "rollout", None if options.quick or options.no_long_tail else long_tail.section)


main = cli.command(
    "rollout",
    __doc__,
    _report,
    *suite.options_of(("kljax", "tunix", "transformers")),
    cli.option("--no-long-tail", action="store_true", help="leave out the completions of all lengths"),
    cli.option("--limits", type=cli.increasing, metavar="N,N", help="race limits of completions, and nothing else"),
)

if __name__ == "__main__":
    sys.exit(main())
