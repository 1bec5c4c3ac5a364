"""Turns, and the sequences that they are trained as."""

import dataclasses
import math
from collections import abc
from collections.abc import Iterable

from train.sequences.sample import Sample, common_length
from train.sequences.token_fields import TOKEN_FIELDS, TOKEN_REWARDS, TURN_IDS, TURN_SCORES, VERSIONS


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
class Episode:
    """An episode, while it runs and after.

    Attributes:
      turns: what was sampled.
      texts: of the turns.
      rewards: named rewards; None: the task scores the last turn.
      finished: whether the environment, or a turn without a tool call, ended it; False: a limit did.
      failure: why the world failed, by name, and the error; None if it did not.
      fault: the last one of the policy, by name, and its text: a call that could not be made, or the limit that ended
        the episode; None if there was none.
      calls: tool calls, and those of them that could not be made.
      forks: sequences after the first one, which `place_sequences` counts.
    """

    turns: list[SampledTurn] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    rewards: dict[str, float] | None = None
    finished: bool = False
    failure: tuple[str, str] | None = None
    fault: tuple[str, str] | None = None
    calls: int = 0
    refused: int = 0
    forks: int = 0


def make_sequences(turns: Iterable[SampledTurn]) -> list[Sample]:
    """Makes sequences of the turns of an episode, in the order of their answers.

    A turn whose prompt begins with all ids of a sequence goes on with it; any other begins one of its own, a fork.
    Every sampled id is trained once, where it was sampled: a later sequence that repeats it has other ids before it, or
    it was not sampled there.

    Raises:
      ValueError: a turn has another number of log-probs or versions than ids, or no prompt.

    Example:
      >>> first = SampledTurn([1], [2, 3], [-0.1, -0.2], [0, 0])
      >>> [row] = make_sequences([first, SampledTurn([1, 2, 3, 4], [5], [-0.3], [0])])
      >>> row.ids, [int(x) for x in row.trained]
      ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])
      >>> rows = make_sequences([first, SampledTurn([1, 3, 4], [5], [-0.3], [0])])  # a template dropped id 2
      >>> [(row.ids, [int(x) for x in row.trained]) for row in rows]
      [([1, 2, 3], [0, 1, 1]), ([1, 3, 4, 5], [0, 0, 0, 1])]
    """
    sequences: list[Sample] = []
    for number, turn in enumerate(turns):
        counts = {len(turn.ids), len(turn.rollout_log_probs), len(turn.versions)}
        if len(counts) > 1 or not turn.prompt_ids:
            raise ValueError(
                f"turn {number}: got {len(turn.prompt_ids)} prompt ids, {len(turn.ids)} ids, "
                f"{len(turn.rollout_log_probs)} log-probs and {len(turn.versions)} versions, expected a prompt, and as "
                "many of each"
            )
        prompt = list(turn.prompt_ids)
        whole = [sequence for sequence in sequences if common_length(sequence.ids, prompt) == len(sequence.ids)]
        if whole:
            sequence = max(whole, key=lambda sequence: len(sequence.ids))
        else:
            sequence = Sample()
            sequences.append(sequence)
        sequence.observe(prompt[len(sequence.ids) :])
        sequence.draw(turn.ids, _token_fields(turn, number))
        sequence.turns.append(turn)
    return sequences


def _token_fields(turn: SampledTurn, number: int) -> dict[str, abc.Sequence[float]]:
    """Returns the values of the sampled ids of a turn of this number, with its reward and its score on the last."""
    score = -math.inf if turn.score is None else turn.score
    of_last = ((TOKEN_REWARDS, turn.reward), (TURN_SCORES, score))
    return {
        "rollout_log_probs": turn.rollout_log_probs,
        VERSIONS: turn.versions,
        TURN_IDS: [number] * len(turn.ids),
        **{name: [*[TOKEN_FIELDS[name].fill] * (len(turn.ids) - 1), value][: len(turn.ids)] for name, value in of_last},
    }
