"""What a task is: examples to train on, examples held out, and a verifier."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Example:
    """One problem: the text that is shown, the answer that is checked, the solution that is imitated.

    Attributes:
      prompt: what a model without a chat template continues.
      answer: what the verifier compares with.
      solution: what the warm start imitates; empty where there is none.
      messages: (role, text) of the conversation for a model with a chat template; empty: the user says the prompt.
      record: the fields of the line that the example was read from.
      prompt_ids, solution_ids: tokens, once they have been counted, so that no text is tokenized twice.
    """

    prompt: str
    answer: str
    solution: str
    messages: tuple[tuple[str, str], ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prompt_ids: np.ndarray | None = field(default=None, compare=False, repr=False)
    solution_ids: np.ndarray | None = field(default=None, compare=False, repr=False)

    def conversation(self) -> tuple[tuple[str, str], ...]:
        """`messages`, or the prompt as the one thing that the user says."""
        return self.messages or (("user", self.prompt),)


@dataclass(frozen=True)
class Task:
    """A named pair of splits with the verifier of their completions.

    `score(example, completion, finished)` returns named rewards; "reward" is the total that is optimised unless the
    config weighs the others itself, "correct" is 0 or 1 and is what accuracy averages. `finished` says that the
    completion ended by itself, not at the length limit. `eval` may be longer than an evaluation: its first examples are
    the ones to use.

    Attributes:
      rewards: the names that `score` returns besides "reward"; empty if they show only when it is called.
      workers: how many completions may be scored at once, by threads.
    """

    name: str
    train: Sequence[Example]
    eval: Sequence[Example]
    score: Callable[[Example, str, bool], dict[str, float]]
    rewards: tuple[str, ...] = ()
    workers: int = 1
