"""What a task is: examples to train on, examples held out, and a verifier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """One problem: the text that is shown, the answer that is checked, the solution that is imitated."""

    prompt: str
    answer: str
    solution: str


@dataclass(frozen=True)
class Task:
    """A named pair of splits with the verifier of their completions.

    `score(example, completion, finished)` returns named rewards; "reward" is the total that is optimised, "correct" is
    0 or 1 and is what accuracy averages. `finished` says that the completion ended with EOS, not at the length
    limit. `eval` may be longer than an evaluation: its first examples are the ones to use.
    """

    name: str
    train: Sequence[Example]
    eval: Sequence[Example]
    score: Callable[[Example, str, bool], dict[str, float]]
