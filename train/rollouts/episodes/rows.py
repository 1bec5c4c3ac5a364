"""Episodes as the rows of a batch: a row for each sequence of turns, rewards, failures and metrics."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from train.config.plan import Layout
from train.context import RunContext
from train.data.tasks import Example
from train.distributed.exchange import exchange_json
from train.distributed.global_arrays import RowSplit
from train.rollouts.episodes.turns import Episode, make_sequences
from train.rollouts.source import ROW_ARRAYS, Completions, Request, SourceError, to_held
from train.sequences.sample import FAILURES, Failure, Sample
from train.sequences.token_fields import TOKEN_REWARDS, TURN_IDS, TURN_SCORES, VERSIONS


@dataclasses.dataclass(frozen=True)
class RowShape:
    """The form of the rows of a batch.

    Attributes:
      prompt: P, the most tokens of a prompt.
      length: T, the most tokens of a row.
      pad_id: of the tokenizer.
      samples: rows of a group.
      fork_rows: how many of them are left for the sequences of episodes that forked.
      shared: whether the rows of a group share their prompt, which goes through the model once.
      last_only: whether an episode has the row of its last sequence alone, as held-out ones, which are not trained.
    """

    prompt: int
    length: int
    pad_id: int
    samples: int
    fork_rows: int = 0
    shared: bool = False
    last_only: bool = False

    @classmethod
    def of(cls, context: RunContext, request: Request) -> "RowShape":
        """Returns the form of the rows of a request; held-out episodes have a row each, and share no prompt."""
        config = context.config
        held_out = request.first_row is not None
        return cls(
            config.data.max_prompt_length,
            config.data.row_length(),
            context.tokenizer.pad_id,
            request.samples,
            fork_rows=0 if held_out else config.rollout.fork_rows,
            shared=Layout.of(config).group > 1 and not held_out,
            last_only=held_out,
        )

    @property
    def episodes(self) -> int:
        """Episodes of a group."""
        return self.samples - self.fork_rows

    def episode_of(self, row: int) -> int:
        """Returns the number of the episode of a row; of a row for forks any one of its group."""
        group, place = divmod(row, self.samples)
        return group * self.episodes + min(place, self.episodes - 1)

    def row_of(self, episode: int) -> int:
        """Returns the row of the first sequence of an episode."""
        group, place = divmod(episode, self.episodes)
        return group * self.samples + place


def place_sequences(episodes: Sequence[Episode], shape: RowShape) -> list[tuple[int, Sample] | None]:
    """Gives each sequence a row: the first of an episode that of its number, others those that are left in its group.

    It counts the forks of each episode. An episode with more sequences than rows are left fails.

    Args:
      episodes: of whole groups, in their order.
      shape: of the rows.

    Returns:
      For each row the number of its episode and the sequence; None for one that is empty.
    """
    rows: list[tuple[int, Sample] | None] = []
    for start in range(0, len(episodes), shape.episodes):
        first: list[tuple[int, Sample] | None] = [None] * shape.episodes
        forks: list[tuple[int, Sample] | None] = []
        for place in range(shape.episodes):
            number = start + place
            episode = episodes[number]
            sequences = make_sequences(episode.turns) if episode.failure is None else []
            episode.forks = max(len(sequences) - 1, 0)
            if shape.last_only:
                sequences = sequences[-1:]
            more = sequences[1:]
            if len(more) > shape.fork_rows - len(forks):
                text = (
                    f"its history was rewritten, and it became {len(sequences)} sequences, for which rows are missing; "
                    "set rollout.fork_rows"
                )
                episode.failure = "forks", text
                continue
            if sequences:
                first[place] = number, sequences[0]
            forks += [(number, sequence) for sequence in more]
        rows += [*first, *forks, *[None] * (shape.fork_rows - len(forks))]
    return rows


def make_rows(
    examples: Sequence[Example],
    prompts: Sequence[Sequence[int]],
    episodes: Sequence[Episode],
    rows: Sequence[tuple[int, Sample] | None],
    shape: RowShape,
    *,
    turn_rewards: bool = False,
    turn_scores: bool = False,
) -> Completions:
    """Makes the rows of a batch; one without a sequence has a prompt alone.

    Args:
      examples: of the episodes.
      prompts: of the episodes; with shared prompts those of a group are equal, but for episodes that failed.
      episodes: of whole groups.
      rows: of `place_sequences`.
      shape: of the rows.
      turn_rewards: whether turns have rewards of their own, which the tokens get.
      turn_scores: whether the tokens get the scores of turns, too.

    Raises:
      SourceError: prompts are shared, and sequences of a group begin with other ones; or rewards have other names.
    """
    names = ["rollout_log_probs", VERSIONS]
    names += [TOKEN_REWARDS] * turn_rewards + [TURN_IDS, TURN_SCORES] * turn_scores
    numbers = [shape.episode_of(row) if placed is None else placed[0] for row, placed in enumerate(rows)]
    rewards = _rewards(episodes)
    samples = []
    for row, placed in enumerate(rows):
        number = numbers[row]
        prompt = list(prompts[_first_placed(rows, row, shape) if shape.shared else number])
        sample = Sample.of_prompt(prompt[: shape.prompt]) if placed is None else placed[1]
        if placed is not None and shape.shared and sample.ids[: len(prompt)] != prompt:
            raise SourceError(
                f"rollout: the episodes of the prompt {examples[number].prompt[:80]!r} begin with other tokens; "
                "set optim.share_prompts=false"
            )
        # Ids before the first sampled one that do not fit before the completion are observations in it.
        sample.prompt_length = min(len(prompt) if shape.shared else sample.first_trained(), shape.prompt)
        sample.finished = episodes[number].finished and placed is not None
        sample.text = episodes[number].texts[-1] if episodes[number].texts else ""
        sample.rewards = rewards[number]
        if placed is None and sample.rewards is not None:
            sample.rewards = dict.fromkeys(sample.rewards, 0.0)
        if row == shape.row_of(number):
            sample.failure = _failure(episodes[number])
        samples.append(sample)
    return Completions.of(
        samples,
        [examples[number] for number in numbers],
        dict.fromkeys(names, ()),
        length=shape.length,
        pad_id=shape.pad_id,
        episode_rows=np.array([-1 if placed is None else shape.row_of(placed[0]) for placed in rows], np.int32),
        sampled=[sample.turns for sample in samples],
    )


def join_rows(completions: Completions, split: RowSplit) -> Completions:
    """Makes the completions of a request from the rows that this process judges, `make_rows` of whole groups.

    Processes whose devices hold rows of others exchange them.

    Args:
      completions: of the own rows.
      split: the rows of the request.
    """
    assert completions.episode_rows is not None
    assert completions.sampled is not None
    names = exchange_json("rollout", sorted(completions.rewards or {}))
    rewards = completions.rewards
    if rewards is None and any(names):
        # All episodes of this process failed.
        rewards = {name: np.zeros(len(split.own), np.float32) for name in next(filter(None, names))}
    numbers = completions.episode_rows
    arrays = {name: getattr(completions, name) for name in (*ROW_ARRAYS, "prompt_lengths")}
    arrays["episode_rows"] = np.where(numbers < 0, -1, split.own[numbers]).astype(np.int32)
    arrays, fields = to_held(arrays, dict(completions.fields), split)
    turns = dict(zip(split.own.tolist(), completions.sampled, strict=True))
    sampled = [turns.get(row) for row in split.held.tolist()]
    return dataclasses.replace(completions, **arrays, fields=fields, sampled=sampled, rewards=rewards)


def _first_placed(rows: Sequence[tuple[int, Sample] | None], row: int, shape: RowShape) -> int:
    """Returns the first episode of the group of a row that has a sequence, or else the episode of the row."""
    start = row - row % shape.samples
    placed = (placed[0] for placed in rows[start : start + shape.samples] if placed is not None)
    return next(placed, shape.episode_of(row))


def episode_metrics(episodes: Sequence[Episode], *, tools: bool) -> dict[str, float]:
    """Returns means over the episodes that did not fail, and counts of those that did, of all processes.

    Args:
      episodes: those of a batch that this process ran, after `place_sequences`.
      tools: whether they count their calls.
    """
    trained = [episode for episode in episodes if episode.failure is None]
    sums = {
        "episode_turns": sum(len(episode.turns) for episode in trained),
        "episode_truncated": sum(not episode.finished for episode in trained),
        "episode_forks": sum(episode.forks for episode in trained),
    }
    if tools:
        sums["episode_tool_calls"] = sum(episode.calls for episode in trained)
        sums["episode_refused_calls"] = sum(episode.refused for episode in trained)
    failed = Counter(FAILURES[episode.failure[0]] for episode in episodes if episode.failure is not None)
    parts = exchange_json("episodes", [len(trained), sums, failed])
    count = max(sum(part[0] for part in parts), 1)
    metrics = {name: sum(part[1][name] for part in parts) / count for name in sums}
    return metrics | {name: float(sum(part[2].get(name, 0) for part in parts)) for name in FAILURES.values()}


def join_episode_metrics(parts: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Joins the episode metrics of several batches: means over all episodes that did not fail, and sums of counts.

    Args:
      parts: the metrics of each batch, of which those of `episode_metrics` count, and the number of its episodes.
    """
    counts = {*FAILURES.values()}
    joined: dict[str, float] = {}
    total = 0.0
    for metrics, episodes in parts:
        trained = episodes - sum(metrics.get(name, 0.0) for name in counts)
        total += trained
        for name, value in metrics.items():
            if name in counts:
                joined[name] = joined.get(name, 0.0) + value
            elif name.startswith("episode_"):
                joined[name] = joined.get(name, 0.0) + trained * value
    return {name: value if name in counts else value / max(total, 1.0) for name, value in joined.items()}


def _failure(episode: Episode) -> Failure | None:
    """Returns the failure of the world, which left the episode out, or else that of the policy."""
    if episode.failure is not None:
        return Failure("world", *episode.failure)
    return None if episode.fault is None else Failure("policy", *episode.fault)


def _rewards(episodes: Sequence[Episode]) -> list[dict[str, float] | None]:
    """Returns the rewards of each episode by name, 0 for one that failed; None if the task scores the last turns."""
    if all(episode.rewards is None for episode in episodes):
        return [None] * len(episodes)
    names = next((list(episode.rewards) for episode in episodes if episode.rewards), ["reward"])
    wrong = next((e.rewards for e in episodes if e.rewards and {*e.rewards} != {*names}), None)
    if wrong is not None:
        raise SourceError(
            f"environment: got the rewards {', '.join(wrong)} of an episode, {', '.join(names)} of another"
        )
    rewards = [{name: (episode.rewards or {}).get(name, 0.0) for name in names} for episode in episodes]
    if "correct" not in names and "reward" in names:
        return [each | {"correct": float(np.float32(each["reward"]) >= 1)} for each in rewards]
    return list(rewards)
