"""Worker script: answers lines of `{"gold", "text"}` with `{"equal"}`, and imports neither JAX nor the trainer.

It is a separate process for two reasons. A completion such as `9^{9^{9}}` can keep sympy busy until the process is
killed; and the time limit of math-verify is a signal, which works only in a main thread.
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
# Time limit of math-verify; the parent process kills a worker that exceeds it.
SECONDS = 3


@functools.lru_cache(maxsize=4096)
def _gold(text: str) -> Any:
    from math_verify import parse

    return parse(f"\\boxed{{{text}}}", parsing_timeout=SECONDS)


def equal(gold: str, text: str) -> bool:
    """Checks whether the last answer in `text` is mathematically equal to `gold`; False if `gold` cannot be parsed."""
    from math_verify import parse, verify

    return bool(verify(_gold(gold), parse(text, parsing_timeout=SECONDS), timeout_seconds=SECONDS))


def main() -> None:
    """Serves until the input ends."""
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ValueError, OSError):  # systems without this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    equal("1", "1")
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            is_equal = equal(request["gold"], request["text"])
        except Exception:  # any error of sympy, including MemoryError
            is_equal = False
        print(json.dumps({"equal": is_equal}), file=answers, flush=True)


if __name__ == "__main__":
    main()
