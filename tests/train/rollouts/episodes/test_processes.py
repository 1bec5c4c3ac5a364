"""Rows of episodes in several processes, each of which runs those of its own prompts."""

import types

import numpy as np
import pytest

from tests import tiny
from train.config.errors import UserError
from train.data.tasks import Example
from train.distributed.global_arrays import RowSplit, are_processes_whole
from train.rollouts import source
from train.rollouts.engine import of_run
from train.rollouts.episodes import rows
from train.rollouts.episodes.rows import RowShape, episode_metrics, join_rows, make_rows, place_sequences
from train.rollouts.episodes.turns import Episode, SampledTurn

SHAPE = RowShape(4, 8, 0, samples=2)
ENVIRONMENT = "environment={name: 'train.data.environments.calculator:Calculator'}"


def completions_of(*episodes: Episode):
    """The rows of two groups of two episodes, of which a process has some."""
    prompts = [[5, 6]] * len(episodes)
    examples = [Example("", "", "")] * len(episodes)
    return make_rows(examples, prompts, episodes, place_sequences(episodes, SHAPE), SHAPE)


def episode(number: int, failure: tuple[str, str] | None = None) -> Episode:
    turns = [SampledTurn([5, 6], [number, 7], [-1.0, -2.0], [3, 3])]
    rewards = None if failure else {"reward": float(number)}
    return Episode(turns=turns, texts=["x"], rewards=rewards, failure=failure)


def test_process_that_holds_rows_of_another_gets_them(monkeypatch):
    own = np.array([2, 3])
    theirs = completions_of(episode(1), episode(2, ("exception", "a fault")))

    def gathered(label, values, numbers, count):
        other = {name: np.asarray(getattr(theirs, name, theirs.fields.get(name))) for name in values}
        return {name: np.concatenate([other[name], value]) for name, value in values.items()}

    monkeypatch.setattr(source, "any_of", lambda *_: True)
    monkeypatch.setattr(source, "gather_rows", gathered)
    split = RowSplit(4, np.arange(4), own)
    joined = join_rows(completions_of(episode(3), episode(4)), split)
    assert joined.tokens[:, :4].tolist() == [[5, 6, 1, 7], [5, 6, 0, 0], [5, 6, 3, 7], [5, 6, 4, 7]]
    assert joined.episode_rows.tolist() == [0, -1, 2, 3]
    assert joined.fields["rollout_log_probs"][:, 3].tolist() == [-2, 0, -2, -2]
    assert [turns and turns[0].ids for turns in joined.sampled] == [None, None, [3, 7], [4, 7]]
    assert joined.rewards["reward"].tolist() == [3, 4]
    assert len(joined.texts) == 2
    assert joined.leading(split).tolist() == [True, True]


def test_process_whose_episodes_failed_has_the_rewards_of_others(monkeypatch):
    monkeypatch.setattr(rows, "exchange_json", lambda _, own: [["correct", "reward"], own])
    failed = completions_of(*[episode(1, ("exception", "a fault"))] * 2)
    joined = join_rows(failed, RowSplit(4, np.array([2, 3]), np.array([2, 3])))
    assert {name: values.tolist() for name, values in joined.rewards.items()} == {"correct": [0, 0], "reward": [0, 0]}
    assert joined.episode_rows.tolist() == [-1, -1]
    assert not joined.leading(RowSplit(4, np.array([2, 3]), np.array([2, 3]))).any()


def test_process_without_rows_has_none():
    joined = join_rows(completions_of(), RowSplit(1, np.zeros(0, int), np.zeros(0, int)))
    assert joined.tokens.shape == (0, 8)
    assert joined.finished.dtype == bool


def test_metrics_are_of_the_episodes_of_all_processes(monkeypatch):
    other = [3, {"episode_turns": 6, "episode_truncated": 0, "episode_forks": 3}, {"episodes_failed_exception": 2}]
    monkeypatch.setattr(rows, "exchange_json", lambda _, own: [other, own])
    metrics = episode_metrics([episode(1), episode(2, ("exception", "a fault"))], tools=False)
    assert metrics["episode_turns"] == 7 / 4
    assert metrics["episode_forks"] == 3 / 4
    assert metrics["episodes_failed_exception"] == 3
    assert metrics["episodes_failed_lost"] == 0


@pytest.mark.parametrize(
    ("owners", "whole"), [([[0, 0], [1, 1]], True), ([[0, 1], [0, 1]], False), ([[0, 0, 1, 1]], False), ([[7]], True)]
)
def test_process_has_all_weights_of_its_data_indices(owners, whole):
    process = np.vectorize(lambda number: types.SimpleNamespace(process_index=number))
    assert are_processes_whole(types.SimpleNamespace(devices=process(owners))) == whole


def test_processes_that_cannot_run_episodes_are_refused(monkeypatch):
    monkeypatch.setattr(of_run, "processes_of", lambda _: {0, 1})
    agent = "rollout.source={type: endpoint, agent: 'train.data.agents.calculator:play'}"
    context = tiny.context_of(tiny.config_of(agent))
    with pytest.raises(UserError, match=r"^rollout.source.type: got endpoint in 2 processes, expected 1"):
        of_run.check_processes(context)
    context = tiny.context_of(tiny.config_of(ENVIRONMENT, "mesh.fsdp=4"), mesh=tiny.mesh_of(1, 4))
    of_run.check_processes(context)
    # Of two processes, each has two devices, and all weights where tensor is 1 or 2.
    monkeypatch.setattr(of_run, "are_processes_whole", lambda mesh: mesh.shape["data"] > 1)
    with pytest.raises(UserError, match=r"^environment: got weights .* set rollout.mesh to \{data: 2, tensor: 2\}$"):
        of_run.check_processes(context)
    monkeypatch.setattr(of_run, "are_processes_whole", lambda mesh: True)
    monkeypatch.setattr(of_run, "row_owners", lambda _, rows: np.arange(rows) // 3)
    with pytest.raises(UserError, match=r"^rollout.prompts_per_step: got .*, expected a multiple of the 2 processes"):
        of_run.check_processes(context)
