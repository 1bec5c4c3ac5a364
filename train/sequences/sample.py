"""A sample on the host: a sequence of ids, which of them are trained, and the values of each; and the rows of samples.

Answers of servers, turns of episodes, rows of recordings and demonstrations all become arrays by `pad_samples`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from train.sequences.token_fields import TOKEN_FIELDS, TokenFields

FAILURES = {
    "exception": "episodes_failed_exception",
    "step_seconds": "episodes_failed_step_seconds",
    "turn_seconds": "episodes_failed_turn_seconds",
    "episode_seconds": "episodes_failed_episode_seconds",
    "ended": "episodes_failed_ended",
    "lost": "episodes_failed_lost",
    "forks": "episodes_failed_forks",
}
"""The metrics that count episodes that are left out, by the name of the reason; of a limit of time it is its field."""
MOST_FAILURE_TEXT = 2000
"""Characters of the text of a failure that are kept."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an episode failed.

    Attributes:
      of: the `world`, and then the episode is left out; or the `policy`, and then it is trained.
      name: of the reason.
      text: the error, or what the policy did.
    """

    of: Literal["world", "policy"]
    name: str
    text: str

    def recorded(self) -> dict[str, str]:
        """Returns the failure as recordings have it: its text is cut, and lone surrogates have no UTF-8."""
        text = self.text[:MOST_FAILURE_TEXT].encode("utf-8", errors="replace").decode()
        return {"of": self.of, "name": self.name, "text": text}

    @classmethod
    def read(cls, value: Any) -> "Failure | None":
        """Reads a failure of a recording; None for a value of another form, which is the user's own."""
        if not isinstance(value, dict) or value.keys() != {"of", "name", "text"}:
            return None
        is_failure = value["of"] in ("world", "policy") and isinstance(value["name"], str)
        return cls(**value) if is_failure and isinstance(value["text"], str) else None


@dataclasses.dataclass
class Sample:
    """A sequence with its token fields, and what is known of its completion.

    Attributes:
      ids: token ids, including BOS and EOS.
      trained: whether each id was sampled, and is neither of the prompt nor an observation.
      prompt_length: ids before the completion, which may begin with an observation.
      fields: by the names of `TOKEN_FIELDS`, a value of each id; an empty one where it has none.
      text: text of the completion, for the verifier.
      finished: whether the completion ended with EOS or a stop, not at a limit.
      rewards: named rewards, including "reward"; None: the task scores the completion.
      failure: of the episode that the sample stands for; None if nothing failed.
      turns: of an episode that were sampled in it.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    trained: list[bool] = dataclasses.field(default_factory=list)
    prompt_length: int = 0
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    text: str = ""
    finished: bool = False
    rewards: Mapping[str, float] | None = None
    failure: Failure | None = None
    turns: list[Any] = dataclasses.field(default_factory=list)

    @classmethod
    def of_prompt(cls, ids: Sequence[int] | np.ndarray) -> "Sample":
        """Makes a sample whose completion is to come."""
        return cls(np.asarray(ids, np.int32).tolist(), [False] * len(ids), len(ids))

    @property
    def prompt_ids(self) -> list[int]:
        """The ids before the completion."""
        return self.ids[: self.prompt_length]

    @property
    def completion_ids(self) -> list[int]:
        """All ids after the prompt, observations among them."""
        return self.ids[self.prompt_length :]

    def of_completion(self, name: str) -> Any:
        """Returns the values of a token field of all ids after the prompt."""
        return self.fields[name][self.prompt_length :]

    def first_trained(self) -> int:
        """Returns the number of ids before the first that is trained; of all, if none is."""
        return [*self.trained, True].index(True)

    def observe(self, ids: Sequence[int]) -> None:
        """Adds ids that were not sampled here."""
        self.ids += ids
        self.trained += [False] * len(ids)
        for name, values in self.fields.items():
            values.extend([TOKEN_FIELDS[name].fill] * len(ids))

    def draw(self, ids: Sequence[int], fields: Mapping[str, Sequence[Any]]) -> None:
        """Adds sampled ids with a value of each, of the fields that all sampled ids have."""
        for name, values in fields.items():
            self.fields.setdefault(name, [TOKEN_FIELDS[name].fill] * len(self.ids)).extend(values)
        self.ids += ids
        self.trained += [True] * len(ids)


def pad_samples(
    samples: Sequence[Sample], sizes: Mapping[str, tuple[int, ...]] | None = None, *, length: int, pad_id: int
) -> dict[str, Any]:
    """Pads samples to arrays of `Batch` and `Completions`; the pad id may be sampled, as masks come from lengths.

    Args:
      samples: one for each row.
      sizes: the token fields of the rows, with the sizes of their trailing axes.
      length: T.
      pad_id: padding id.

    Raises:
      ValueError: for a sample that is longer than T.

    Example:
      >>> sample = Sample.of_prompt([5, 6])
      >>> sample.draw([8], {"rollout_log_probs": [-1.0]})
      >>> rows = pad_samples([sample, Sample.of_prompt([7])], {"rollout_log_probs": ()}, length=4, pad_id=0)
      >>> rows["tokens"].tolist()
      [[5, 6, 8, 0], [7, 0, 0, 0]]
      >>> rows["fields"]["rollout_log_probs"].tolist()
      [[0.0, 0.0, -1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """
    lengths = np.array([len(sample.ids) for sample in samples], np.int32)
    tokens = np.full((len(samples), length), pad_id, np.int32)
    completion_mask = np.zeros(tokens.shape, bool)
    padded: TokenFields = {}
    for name, axes in (sizes or {}).items():
        padded[name] = np.full((*tokens.shape, *axes), TOKEN_FIELDS[name].fill, TOKEN_FIELDS[name].dtype)
    for row, sample in enumerate(samples):
        if lengths[row] > length:
            parts = f"{sample.prompt_length} + {len(sample.completion_ids)}"
            raise ValueError(f"row {row}: got {parts} tokens, expected at most {length} together")
        tokens[row, : lengths[row]] = sample.ids
        completion_mask[row, : lengths[row]] = sample.trained
        for name, out in padded.items():
            first = 0 if TOKEN_FIELDS[name].prompts else sample.prompt_length
            if name in sample.fields:
                TOKEN_FIELDS[name].write(sample.fields[name][first:], out[row, first : lengths[row]])
    return {
        "tokens": tokens,
        "token_mask": np.arange(length) < lengths[:, None],
        "completion_mask": completion_mask,
        "prompt_lengths": np.array([sample.prompt_length for sample in samples], np.int32),
        "fields": padded,
    }


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Counts the ids with which both begin.

    Example:
      >>> common_length([1, 2, 3], [1, 2, 4, 5]), common_length([1], [1, 2])
      (2, 1)
    """
    # A turn mostly goes on with all that is there.
    if left == right[: len(left)]:
        return len(left)
    return next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
