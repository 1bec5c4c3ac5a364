"""Sampling with a whole model on a CPU: kljax against Tunix's sampler and `generate` of transformers.

    python -m benchmarks.rollout --make-envs ENVS      once; Tunix and transformers, in environments of their own
    python -m benchmarks.rollout --envs ENVS --json PATH --markdown PATH
    python -m benchmarks.rollout --contenders kljax --against CHECKOUT

All have the same weights. Before anything is timed, their log-probs of the same sequences are compared; the command
fails if they differ. Then each contender, in a process of its own, completes the same prompts once a round while the
others wait. A missed target does not fail the command. Completions of very different lengths follow.

With `--against`, another checkout of this repository races too: targets say whether this one is more than 3 % slower.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.suites.model import command, long_tail


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = command.make_parser("rollout", __doc__, ("kljax", "tunix", "transformers"))
    parser.add_argument("--no-long-tail", action="store_true", help="leave out the completions of all lengths")
    options = parser.parse_args(arguments)
    return command.main(options, parser, "rollout", None if options.quick or options.no_long_tail else _long_tail)


def _long_tail(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Compares continuous batching with batches that wait."""
    found = long_tail.report(long_tail.measure(long_tail.Tail(), options.rounds))
    return {"long_tail": found}, long_tail.lines(found)


if __name__ == "__main__":
    sys.exit(main())
