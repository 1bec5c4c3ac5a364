"""Tasks: training examples, a held-out set, and a verifier."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_LOG = logging.getLogger(__name__)
SPLIT_SEED = 0
"""The seed of generated problems and of their split, whatever that of a run is.

Accuracies of different seeds are on the same problems, and a base model from the warm start of one run has not seen the
held-out problems of another.
"""
FORMAT_WEIGHT = 0.1
"""Weight of the form of an answer in the reward, beside 1 for the answer."""


@dataclass(frozen=True)
class Example:
    """One problem: prompt, answer for the verifier, and solution for the warm start.

    Attributes:
      prompt: text of the prompt for a model without a chat template.
      answer: reference answer of the verifier.
      solution: target of the warm start; empty if there is none.
      messages: (role, text) pairs for a chat template; empty means one user message with the prompt.
      demonstration: such pairs after the prompt, in place of the solution, for the warm start of episodes: turns, whose
        role is `assistant`, and one observation between two, which is not trained.
      record: fields of the line that the example was read from.
      prompt_ids, solution_ids: cached tokens, so that no text is tokenized twice.
      solution_mask: for each of `solution_ids` whether the warm start trains it; None: all. Observations are not.
    """

    prompt: str
    answer: str
    solution: str
    messages: tuple[tuple[str, str], ...] = ()
    demonstration: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    record: Mapping[str, Any] = field(default_factory=dict, hash=False)
    prompt_ids: np.ndarray | None = field(default=None, compare=False, repr=False)
    solution_ids: np.ndarray | None = field(default=None, compare=False, repr=False)
    solution_mask: np.ndarray | None = field(default=None, compare=False, repr=False)

    def conversation(self) -> tuple[tuple[str, str], ...]:
        """Returns `messages`, or the prompt as one user message."""
        return self.messages or (("user", self.prompt),)


def hold_out(examples: Sequence[Example], *, problems: int, held_out: int, found: str) -> int:
    """Returns how many of generated examples are held out: at most half, with a logged warning, if there are too few.

    Args:
      examples: different ones.
      problems: number of training problems that is wanted.
      held_out: number of held-out problems that is wanted.
      found: begins the warning, as in `found 9 different problems`.
    """
    if len(examples) >= problems + held_out:
        return held_out
    held_out = min(held_out, len(examples) // 2)
    _LOG.warning(
        "data.problems: %s %d different problems, expected %d and the held-out set; %d are held out",
        found,
        len(examples),
        problems,
        held_out,
    )
    return held_out


def correct_and_format(correct: float, format_: float) -> dict[str, float]:
    """Returns named rewards: correct, format, and reward, their weighted sum."""
    return {"reward": correct + FORMAT_WEIGHT * format_, "correct": correct, "format": format_}


@dataclass(frozen=True)
class Task:
    """Training examples and held-out set with the verifier of their completions.

    `score(example, completion, finished)` returns named rewards. "reward" is the scalar that RL optimizes unless the
    config sets weights; "correct" is 0 or 1, and accuracy averages it. `finished` means that the completion ended with
    EOS or a stop, not at the length limit. `eval` may be longer than an evaluation, which uses its first examples.

    Attributes:
      rewards: names that `score` returns besides "reward"; empty if they are unknown before the first call.
      workers: maximum number of threads that score completions.
    """

    name: str
    train: Sequence[Example]
    eval: Sequence[Example]
    score: Callable[[Example, str, bool], dict[str, float]]
    rewards: tuple[str, ...] = ()
    workers: int = 1
