"""Turns, and the sequences that they are trained as."""

import dataclasses
import math
from collections import abc
from collections.abc import Iterable

from train.rollouts.prefix import common_length
from train.sequences.token_fields import TOKEN_FIELDS, TOKEN_REWARDS, TURN_IDS, TURN_SCORES, VERSIONS

OF_TURNS = ("rollout_log_probs", VERSIONS, TOKEN_REWARDS, TURN_IDS, TURN_SCORES)
"""The fields of sampled ids; others of a sequence hold their fill."""


@dataclasses.dataclass(frozen=True)
class SampledTurn:
    """A request to the policy and its answer, as every server with token ids has them.

    Attributes:
      prompt_ids: all ids before.
      ids: the sampled ids.
      rollout_log_probs: of these.
      versions: RL steps of the policy that drew each of them.
      reward: that the environment gave for it, a part of that of the episode.
      score: how good the state is after it; None if the environment does not say.
    """

    prompt_ids: abc.Sequence[int]
    ids: abc.Sequence[int]
    rollout_log_probs: abc.Sequence[float]
    versions: abc.Sequence[int]
    reward: float = 0.0
    score: float | None = None


@dataclasses.dataclass
class Sequence:
    """Turns that extend each other: ids, which of them are trained, and the values of each.

    Attributes:
      fields: by the names of `TOKEN_FIELDS`, a value of each id.
      parent: number of the sequence with which it begins alike, and of the ids that both have; None for the first.
      turns: the turns that were sampled in it.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    sampled: list[bool] = dataclasses.field(default_factory=list)
    fields: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {name: [] for name in OF_TURNS})
    parent: tuple[int, int] | None = None
    turns: list[SampledTurn] = dataclasses.field(default_factory=list)

    def observe(self, ids: abc.Sequence[int]) -> None:
        """Adds ids that were not sampled here."""
        self.ids += ids
        self.sampled += [False] * len(ids)
        for name, values in self.fields.items():
            values.extend([TOKEN_FIELDS[name].fill] * len(ids))

    def sample(self, turn: SampledTurn, number: int) -> None:
        """Adds the sampled ids of a turn of this number, with its reward and its score on the last."""
        self.turns.append(turn)
        self.ids += turn.ids
        self.sampled += [True] * len(turn.ids)
        self.fields["rollout_log_probs"] += turn.rollout_log_probs
        self.fields[VERSIONS] += turn.versions
        self.fields[TURN_IDS] += [number] * len(turn.ids)
        score = -math.inf if turn.score is None else turn.score
        for name, value in ((TOKEN_REWARDS, turn.reward), (TURN_SCORES, score)):
            self.fields[name] += [*[TOKEN_FIELDS[name].fill] * (len(turn.ids) - 1), value][: len(turn.ids)]


@dataclasses.dataclass
class Episode:
    """An episode, while it runs and after.

    Attributes:
      turns: what was sampled.
      texts: of the turns.
      rewards: named rewards; None: the task scores the last turn.
      finished: whether the environment, or a turn without a tool call, ended it; False: a limit did.
      failure: why the world failed, by name, and the error; None if it did not.
      calls: tool calls, and those of them that could not be made.
    """

    turns: list[SampledTurn] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    rewards: dict[str, float] | None = None
    finished: bool = False
    failure: tuple[str, str] | None = None
    calls: int = 0
    refused: int = 0


def make_sequences(turns: Iterable[SampledTurn]) -> list[Sequence]:
    """Makes sequences of the turns of an episode, in the order of their answers.

    A turn whose prompt begins with all ids of a sequence goes on with it; any other begins one of its own, a fork.
    Every sampled id is trained once, where it was sampled: a later sequence that repeats it has other ids before it, or
    it was not sampled there.

    Raises:
      ValueError: a turn has another number of log-probs or versions than ids, or no prompt.

    Example:
      >>> first = SampledTurn([1], [2, 3], [-0.1, -0.2], [0, 0])
      >>> [row] = make_sequences([first, SampledTurn([1, 2, 3, 4], [5], [-0.3], [0])])
      >>> row.ids, [int(x) for x in row.sampled]
      ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])
      >>> rows = make_sequences([first, SampledTurn([1, 3, 4], [5], [-0.3], [0])])  # a template dropped id 2
      >>> [(row.ids, [int(x) for x in row.sampled], row.parent) for row in rows]
      [([1, 2, 3], [0, 1, 1], None), ([1, 3, 4, 5], [0, 0, 0, 1], (0, 1))]
    """
    sequences: list[Sequence] = []
    for number, turn in enumerate(turns):
        counts = {len(turn.ids), len(turn.rollout_log_probs), len(turn.versions)}
        if len(counts) > 1 or not turn.prompt_ids:
            raise ValueError(
                f"turn {number}: got {len(turn.prompt_ids)} prompt ids, {len(turn.ids)} ids, "
                f"{len(turn.rollout_log_probs)} log-probs and {len(turn.versions)} versions, expected a prompt, and as "
                "many of each"
            )
        prompt = list(turn.prompt_ids)
        shared = [common_length(sequence.ids, prompt) for sequence in sequences]
        whole = [index for index, sequence in enumerate(sequences) if shared[index] == len(sequence.ids)]
        if whole:
            sequence = sequences[max(whole, key=shared.__getitem__)]
            sequence.observe(prompt[len(sequence.ids) :])
        else:
            parent = max(range(len(sequences)), key=shared.__getitem__, default=None)
            sequence = Sequence(parent=None if parent is None else (parent, shared[parent]))
            sequence.observe(prompt)
            sequences.append(sequence)
        sequence.sample(turn, number)
    return sequences
