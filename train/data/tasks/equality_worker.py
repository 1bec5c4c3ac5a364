"""Answers lines of `{"gold", "text"}` with `{"equal"}`; run as a script, so that it needs neither JAX nor the trainer.

A process of its own, because what a model writes (`9^{9^{9}}`) can keep one busy for ever in a way that only ending the
process stops, and because math-verify's own time limit is a signal, which works in a main thread alone.
"""

import contextlib
import functools
import json
import logging
import os
import resource
import sys
from typing import Any

MEMORY = 4 << 30
# math-verify's own limit; what it does not stop is stopped from outside.
SECONDS = 3


@functools.lru_cache(maxsize=4096)
def _gold(text: str) -> Any:
    from math_verify import parse

    return parse(f"\\boxed{{{text}}}", parsing_timeout=SECONDS)


def equal(gold: str, text: str) -> bool:
    """Whether the last answer in `text` is `gold`, as mathematics; a gold answer that cannot be read equals nothing."""
    from math_verify import parse, verify

    return bool(verify(_gold(gold), parse(text, parsing_timeout=SECONDS), timeout_seconds=SECONDS))


def main() -> None:
    """Serve until the input ends."""
    # Whatever a library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ValueError, OSError):  # a system that has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    equal("1", "1")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = equal(request["gold"], request["text"])
        except Exception:  # whatever sympy makes of it, MemoryError too
            found = False
        print(json.dumps({"equal": found}), file=answers, flush=True)


if __name__ == "__main__":
    main()
