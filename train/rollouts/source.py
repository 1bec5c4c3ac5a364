"""The protocol between the trainer and a source of completions: requests, completions and streams of them."""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from train.config.errors import UserError
from train.context import RunContext
from train.data.prompts import prompt_ids
from train.data.tasks import Example
from train.data.tokenizers import Tokenizer
from train.distributed.exchange import any_of
from train.distributed.global_arrays import RowSplit, gather_rows
from train.models.sharding import batch_sharding
from train.rl.keys import purpose_key
from train.sequences.batch import move_columns
from train.sequences.sample import Failure, Sample, pad_samples
from train.sequences.token_fields import TOKEN_FIELDS, UNKNOWN, VERSIONS, TokenFields

Array = jax.Array | np.ndarray
ROW_ARRAYS = ("tokens", "token_mask", "completion_mask")
"""Names of the arrays that all completions have."""


class SourceError(UserError):
    """Raised when a source stops answering, or a file for or from it cannot be written.

    The run saves its state before it ends, so it can be resumed.
    """


def batch_rows(context: RunContext) -> RowSplit:
    """Returns the rows of a batch that the arrays of this process hold, and those that it judges."""
    return RowSplit.of(batch_sharding(context.mesh), context.config.rows_per_batch())


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The request for completions: of the prompts of one step, or of some held-out prompts. Equal only to itself.

    Attributes:
      examples: the prompts; a recording ignores them, as its completions bring their own.
      samples: completions per prompt, in consecutive rows.
      step: number of RL steps done.
      key: random key of the completions.
      rows: the rows that the arrays of this process hold, and the rows that it judges.
      first_row: for held-out prompts, the number of the first among all of them: the tokens of a row depend on the key
        and this number, and not on the size of the request; None for the prompts of a step.
      greedy: whether to take the most probable tokens.
    """

    examples: Sequence[Example]
    samples: int
    step: int
    key: jax.Array
    rows: RowSplit
    first_row: int | None = None
    greedy: bool = False

    @classmethod
    def of(cls, context: RunContext, step: int) -> "Request":
        """Makes the request of a step, which depends on nothing but the config and the step."""
        config = context.config
        return cls(
            examples=context.prompts.batch(step),
            samples=config.rollout.samples_per_prompt,
            step=step,
            key=purpose_key(config.seed, "sample", step),
            rows=batch_rows(context),
        )

    @classmethod
    def held_out(cls, context: RunContext, first: int, *, step: int, key: jax.Array, greedy: bool) -> "Request":
        """Makes the request for one completion of `eval.batch_size` held-out prompts, or of as many as are left."""
        size = context.config.eval.batch_size
        examples = context.held_out[first : first + size]
        split = RowSplit.of(batch_sharding(context.mesh), size)
        held, own = (rows[rows < len(examples)] for rows in (split.held, split.own))
        rows = RowSplit(len(examples), held, own)
        return cls(examples, 1, step, key, rows, first_row=first, greedy=greedy)

    def prompt_of(self, row: int, tokenizer: Tokenizer) -> list[int]:
        """Returns the ids of the prompt of a row."""
        return [int(token) for token in prompt_ids(self.examples[row // self.samples], tokenizer)]

    def align(self, completions: "Completions", tokenizer: Tokenizer) -> "Completions":
        """Moves completions to column 0, whose prompts may be padded on the left, and notes the prompt lengths."""
        first = completions.token_mask.argmax(-1)
        move = functools.partial(move_columns, by=first, length=completions.tokens.shape[1])
        lengths = [len(self.prompt_of(row, tokenizer)) for row in self.rows.held.tolist()]
        return dataclasses.replace(
            completions,
            **{name: move(getattr(completions, name)) for name in ROW_ARRAYS},
            prompt_lengths=np.array(lengths, np.int32),
            fields={name: move(x, fill=TOKEN_FIELDS[name].fill) for name, x in completions.fields.items()},
        )

    def with_other_prompts(self, tokens: np.ndarray, token_mask: np.ndarray, tokenizer: Tokenizer) -> list[int]:
        """Lists the rows, of those that this process holds, that begin with another prompt."""
        rows = zip(self.rows.held.tolist(), np.where(token_mask, tokens, UNKNOWN), strict=True)
        return [row for row, ids in rows if (prompt := self.prompt_of(row, tokenizer)) != ids[: len(prompt)].tolist()]


@dataclasses.dataclass(frozen=True)
class Completions:
    """Rows of prompts with completions, from column 0 on, padded on the right.

    The completions of a prompt are in consecutive rows. With several processes, arrays on the devices have all rows,
    `tokens`, masks and `fields` on the host `rows.held` of the request, and everything else `rows.own`.

    Attributes:
      examples: [B] example of each row.
      tokens: [B, T] int32.
      token_mask: [B, T] bool, True on real tokens.
      completion_mask: [B, T] bool, True on sampled tokens, including EOS.
      finished: [B] bool; True for rows that ended with EOS or a stop, not at the length limit.
      texts: [B] text of each completion.
      finish: waits for the devices, and returns `finished`, `texts`, `metrics` and `timings`, which are empty until
        then; None if nothing is under way.
      fields: [B, T, ...] by name, values of the sampled tokens such as `log_probs`, as `TOKEN_FIELDS` declares
        them.
      prompt_lengths: [B] int32, the tokens of each prompt; None: all before the first sampled one.
      rewards: named rewards, each [B] float32; None means that the task scores the completions.
      episode_rows: [B] int32, of the rows that this process holds, the row of the episode that a row belongs to: its
        own, or an earlier one that it forked from; -1 for rows without an episode that counts, which have no sampled
        token. None: each row is an episode, as in samples of some rows alone.
      failures: [B] the failure of the episode that each row stands for, or None; None: no row has one.
      sampled: [B] the turns of each row that this process holds, as they were sampled, which the batch is checked
        against; None, of all or of a row: no check.
      recorded_rows: [B] int64, where each row lies in the recording, of the rows of all processes; None for others.
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
    prompt_lengths: Array | None = None
    rewards: Mapping[str, np.ndarray] | None = None
    episode_rows: np.ndarray | None = None
    failures: Sequence[Failure | None] | None = None
    sampled: Sequence[Sequence[Any] | None] | None = None
    recorded_rows: np.ndarray | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        examples: Sequence[Example],
        sizes: Mapping[str, tuple[int, ...]],
        *,
        length: int,
        pad_id: int,
        judged: Sequence[int] | np.ndarray | None = None,
        **others: Any,
    ) -> "Completions":
        """Makes completions of samples on the host, whatever they came from.

        Args:
          samples: of the rows that this process holds.
          examples: of the rows that it judges.
          sizes, length, pad_id: see `pad_samples`.
          judged: the numbers of these among the samples; None: all.
          others: attributes that samples do not have.
        """
        own = samples if judged is None else [samples[number] for number in judged]
        rewards = [sample.rewards for sample in own if sample.rewards is not None]
        names = rewards[0] if rewards else ()
        return cls(
            examples=examples,
            **pad_samples(samples, sizes, length=length, pad_id=pad_id),
            finished=np.array([sample.finished for sample in own], bool),
            texts=[sample.text for sample in own],
            rewards={name: np.array([named[name] for named in rewards], np.float32) for name in names} or None,
            failures=[sample.failure for sample in own],
            **others,
        )

    def completed(self) -> "Completions":
        """Returns the completions with all fields, when the devices have sampled them."""
        return self if self.finish is None else dataclasses.replace(self, finish=None, **self.finish())

    def leading(self, rows: RowSplit) -> np.ndarray:
        """Whether each own row stands for its episode: all do, but for forks and rows without an episode."""
        return rows.own == (rows.own if self.episode_rows is None else rows.select_own(self.episode_rows))

    def with_versions(self, version: int) -> "Completions":
        """Returns the completions with this version for all sampled tokens, unless they have versions of their own."""
        if VERSIONS in self.fields:
            return self
        field = TOKEN_FIELDS[VERSIONS]
        where: Any = jnp.where if isinstance(self.completion_mask, jax.Array) else np.where
        versions = where(self.completion_mask, np.asarray(version, field.dtype), np.asarray(field.fill, field.dtype))
        return dataclasses.replace(self, fields={**self.fields, VERSIONS: versions})


def to_held(arrays: dict[str, Any], fields: dict[str, Any], split: RowSplit) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns arrays and token fields of the rows that this process holds, from those of the rows that each judges.

    Processes exchange rows only if one of them holds rows that it does not judge.
    """
    if not any_of("rollout", not np.array_equal(split.own, split.held)):
        return arrays, fields
    gathered = gather_rows("rollout", {**arrays, **fields}, split.own, split.count)
    held = {name: array[split.held] for name, array in gathered.items()}
    return {name: held[name] for name in arrays}, {name: held[name] for name in fields}


@dataclasses.dataclass(frozen=True)
class FinishedSamples:
    """Finished samples: all of a request, or some of its rows.

    Attributes:
      request: the very object that was given to `start`.
      completions: of `rows`; or of the request, as `Completions` says.
      rows: [n] numbers of the rows in the request, each of them one of `request.rows.own`, for arrays of n rows on the
        host; None for the whole request. A process without own rows gets one part without rows.
      seconds: from the start of the request to its last token, if the source knows; None otherwise.
    """

    request: Request
    completions: Completions
    rows: np.ndarray | None = None
    seconds: float | None = None


class StreamSource(Protocol):
    """A stream of samples, as a user may have one. Every method may raise `SourceError`, when a server or file is gone.

    The trainer starts requests, several before it takes the first with `rollout.ahead`, and takes samples until a batch
    is full. Requests may finish in any order, and in parts. The samples say in the token field `token_versions` how
    many RL steps the policy had that drew each token.
    """

    def update(self, policy: kljax.Policy, version: int) -> None:
        """Sets the weights of what is drawn from now on, with the number of their RL steps."""

    def start(self, requests: Sequence[Request]) -> None:
        """Begins to draw the completions of these requests, and returns at once if it can."""

    def take(self) -> FinishedSamples:
        """Waits for the next finished samples of any request that was started."""
        ...

    def close(self) -> None:
        """Ends what is in flight, and frees the resources of the source outside this process."""


class Source(StreamSource, Protocol):
    """A stream of the trainer.

    Attributes:
      row_count: number of the rows that come again in every epoch; None if every sample is new.
    """

    row_count: int | None


class InTurn:
    """The stream of a source that has nothing in flight: `sample` answers a request when it is taken, in turn."""

    row_count: int | None = None

    def __init__(self) -> None:
        self._started: deque[Request] = deque()

    def sample(self, request: Request) -> Completions:
        """Returns the completions of one request."""
        raise NotImplementedError

    def start(self, requests: Sequence[Request]) -> None:
        """Notes the requests."""
        self._started.extend(requests)

    def take(self) -> FinishedSamples:
        """Answers the oldest request that was not taken."""
        request = self._started.popleft()
        return FinishedSamples(request, self.sample(request))
