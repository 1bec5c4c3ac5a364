"""The protocol between the trainer and a source of completions: `Request`, `Completions` and `Source`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

import kljax
from train.config.errors import UserError
from train.context import RunContext
from train.data.tasks import Example
from train.distributed.global_arrays import RowSplit
from train.models.sharding import batch_sharding
from train.rl.keys import purpose_key
from train.rl.token_fields import TokenFields

Array = jax.Array | np.ndarray


class SourceError(UserError):
    """Raised when a source stops answering, or a file for or from it cannot be written.

    The run saves its state before it ends, so it can be resumed.
    """


@dataclasses.dataclass(frozen=True)
class Request:
    """The request for the completions of one step.

    Attributes:
      examples: prompts of the step; none if the completions of a recording bring their own.
      samples: completions per prompt.
      step: number of RL steps done.
      key: random key of the completions.
      rows: the rows that the arrays of this process hold, and the rows that it judges.
    """

    examples: Sequence[Example]
    samples: int
    step: int
    key: jax.Array
    rows: RowSplit

    @classmethod
    def of(cls, context: RunContext, step: int) -> "Request":
        """Makes the request of a step, which depends on nothing but the config and the step."""
        config = context.config
        return cls(
            examples=context.prompts.batch(step),
            samples=config.rollout.samples_per_prompt,
            step=step,
            key=purpose_key(config.seed, "sample", step),
            rows=RowSplit.of(batch_sharding(context.mesh), config.rows_per_batch()),
        )


@dataclasses.dataclass(frozen=True)
class Completions:
    """Rows of prompts, left-padded to P, with completions, right-padded to C.

    The completions of a prompt are in consecutive rows. With several processes, arrays on the devices have all rows,
    `tokens`, masks and `fields` on the host `rows.held` of the request, and everything else `rows.own`.

    Attributes:
      examples: [B] example of each row.
      tokens: [B, P + C] int32.
      token_mask: [B, P + C] bool, True on real tokens.
      completion_mask: [B, P + C] bool, True on sampled tokens, including EOS.
      finished: [B] bool; True for rows that ended with EOS or a stop, not at the length limit.
      texts: [B] text of each completion.
      finish: waits for the devices, and returns `finished`, `texts`, `metrics` and `timings`, which are empty until
        then; None if nothing is under way.
      fields: [B, P + C, ...] by name, values of the sampled tokens such as `log_probs`, as `TOKEN_FIELDS` declares
        them.
      rewards: named rewards, each [B] float32; None means that the task scores the completions.
      recorded_rows: [B] int64, where each row lies in the recording, of the rows of all processes; None for others.
      lags: [B] int32, RL steps between the policy that sampled a row and the one that trains on it; None if all are of
        `rollout.policy_lag`.
      metrics: measurements of the source that are equal in identical runs.
      timings: measurements that differ between identical runs.
    """

    examples: Sequence[Example]
    tokens: Array
    token_mask: Array
    completion_mask: Array
    finished: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))
    texts: Sequence[str] = ()
    finish: Callable[[], Mapping[str, Any]] | None = None
    fields: TokenFields = dataclasses.field(default_factory=dict)
    rewards: Mapping[str, np.ndarray] | None = None
    recorded_rows: np.ndarray | None = None
    lags: np.ndarray | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def completed(self) -> "Completions":
        """Returns the completions with all fields, when the devices have sampled them."""
        return self if self.finish is None else dataclasses.replace(self, finish=None, **self.finish())


class Source(Protocol):
    """A source of completions.

    The trainer calls `update` before every `sample`, with the policy and its number of RL steps. Both raise
    `SourceError` when a server or file is gone.
    """

    def update(self, policy: kljax.Policy, step: int) -> None:
        """Sets the weights of the following samples."""

    def sample(self, request: Request) -> Completions:
        """Returns the completions of one step."""

    def close(self) -> None:
        """Frees the resources of the source outside this process."""
