"""What completions are asked for, what comes back, and the protocol between: the only thing that the trainer knows."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

import kljax
from train.config.errors import UserError
from train.data.tasks import Example

Array = jax.Array | np.ndarray


class SourceError(UserError):
    """A source stopped answering, or what passes between it and the run cannot be written.

    The run saves its state before it ends, so that it can be continued.
    """


@dataclasses.dataclass(frozen=True)
class Request:
    """The completions of one step.

    Attributes:
      examples: the prompts of the step.
      samples: completions of each.
      step: RL steps done.
      key: all randomness of the answer.
    """

    examples: Sequence[Example]
    samples: int
    step: int
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class Completions:
    """Rows of prompts, left-padded to P, with completions, right-padded to C; on the host or on the devices.

    The completions of a prompt follow one another.

    Attributes:
      examples: [B] what each row answers.
      tokens: [B, P + C] int32.
      token_mask: [B, P + C] bool, True on real tokens.
      completion_mask: [B, P + C] bool, True on sampled tokens, with the one that ended the row.
      finished: [B] bool, on the host: rows that ended by themselves and not at the limit of length.
      texts: [B] the completions as text.
      log_probs: [B, P + C] float32 log-probs of the sampled tokens under whatever sampled them, 0 elsewhere; or None.
      rewards: named rewards, each [B] float32, where the source knows them; None: the task judges.
      metrics: what the source measured of itself, the same in every run.
      timings: what it measured that differs from run to run.
    """

    examples: Sequence[Example]
    tokens: Array
    token_mask: Array
    completion_mask: Array
    finished: np.ndarray
    texts: Sequence[str]
    log_probs: Array | None = None
    rewards: Mapping[str, np.ndarray] | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Source(Protocol):
    """Where completions come from.

    `update` is called before every `sample`, with the policy to sample with and the number of RL steps that made it.
    Both raise `SourceError` when what they depend on is gone.
    """

    def update(self, policy: kljax.Policy, step: int) -> None:
        """Samples with these weights from now on."""

    def sample(self, request: Request) -> Completions:
        """The completions of one step."""

    def close(self) -> None:
        """Frees what the source holds outside this process."""
