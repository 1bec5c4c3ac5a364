"""The batch of sampling and update that kljax and its peers do on the same card; NumPy is not needed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 32, 64
KL_COEF = 0.04
LEARNING_RATE = 1e-5


@dataclasses.dataclass(frozen=True)
class UpdateWork:
    """Completions of full length of random prompts; the adapter is on all projections.

    Attributes:
      name: of the model.
      prompts: of a batch.
      samples: completions of a prompt.
      prompt_length: tokens of a prompt.
      completion_length: tokens of a completion.
      micro_batches: parts of the update.
    """

    name: str
    prompts: int = 16
    samples: int = 8
    prompt_length: int = 256
    completion_length: int = 768
    micro_batches: int = 4

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Returns the tokens that an update is given, a shared prompt once."""
        return self.prompts * self.prompt_length + self.rows * self.completion_length


TINY = UpdateWork("tiny", prompts=2, samples=2, prompt_length=8, completion_length=8, micro_batches=1)


def work_of(name: str) -> UpdateWork:
    """Returns the batch of a model; "tiny" is that of a laptop."""
    return TINY if name == TINY.name else UpdateWork(name)


def measured(work: UpdateWork, seconds: Mapping[str, float], sampled: int, peaks: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of a row: seconds, tokens per second and peak memory of "rollout" and "update".

    Args:
      work: the batch.
      seconds: by part.
      sampled: tokens that the rollout returned.
      peaks: bytes by part, None where the device does not tell.
    """
    tokens = {"rollout": sampled, "update": work.tokens}
    row: dict[str, Any] = {}
    for part, count in tokens.items():
        row |= {f"{part}_s": seconds[part], f"{part}_rate": count / seconds[part], f"{part}_bytes": peaks[part]}
    return row
