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
from typing import Any

from benchmarks.harness import cli, machine
from benchmarks.harness.report import Report
from benchmarks.suites.model import limits, long_tail, suite


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.limits is not None:
        cli.limit_threads(options.threads)
        return machine.conditions() | limits.measure(limits.TAIL, options.limits, options.rounds)
    fields = suite.measure(options, "rollout")
    if options.quick or options.no_long_tail:
        return fields
    return fields | {"long_tail": long_tail.measure(long_tail.TAIL, options.rounds)}


def report(fields: dict[str, Any]) -> Report:
    """Makes the report of a race, or of limits."""
    if "lengths" in fields:
        return limits.report(fields)
    section = [long_tail.report(fields["long_tail"])] if "long_tail" in fields else []
    return suite.report(fields, "rollout", section)


main = cli.command(
    "rollout",
    __doc__,
    _measure,
    report,
    *suite.options_of(("kljax", "tunix", "transformers")),
    cli.option("--no-long-tail", action="store_true", help="leave out the completions of all lengths"),
    cli.option("--limits", type=limits.increasing, metavar="N,N", help="race limits of completions, and nothing else"),
)

if __name__ == "__main__":
    sys.exit(main())
