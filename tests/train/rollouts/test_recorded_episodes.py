"""Episodes in recordings: observations, failed rows and forks come back as they were trained."""

import dataclasses
import json

import numpy as np
import pytest

from tests import tiny
from tests.train.rollouts.test_holes import SOURCE
from train.config.errors import UserError
from train.data.prompts import encode_prompts
from train.rollouts.collect import collect
from train.rollouts.open import open_source
from train.rollouts.source import Completions, InTurn
from train.rollouts.stream import Stream

SHAPE = "rollout={prompts_per_step: 2, samples_per_prompt: 4}"


class RowsOfEpisodes(InTurn):
    """Two groups: row 1 has an observation, row 2 forked from it, and the last row of each group has no episode."""

    def __init__(self, change=lambda rows: rows) -> None:
        super().__init__()
        self.sample = lambda request: change(episodes_of(request))


def episodes_of(request):
    prompts, mask = encode_prompts(request.examples, tiny.ByteTokenizer(), tiny.PROMPT)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (8, tiny.LENGTH)).astype(np.int32)
    tokens[:, : tiny.PROMPT] = prompts.repeat(4, axis=0)
    token_mask = np.pad(mask.repeat(4, axis=0), ((0, 0), (0, tiny.NEW_TOKENS)))
    completion_mask = np.zeros_like(token_mask)
    token_mask[:, tiny.PROMPT :] = completion_mask[:, tiny.PROMPT :] = True
    completion_mask[1, tiny.PROMPT + 1 : tiny.PROMPT + 3] = False
    completion_mask[2, tiny.PROMPT : tiny.PROMPT + 2] = False  # its history, more than the prompt has room for
    for empty in (3, 7):
        token_mask[empty, tiny.PROMPT :] = completion_mask[empty] = False
    log_probs = -rng.random(tokens.shape).astype(np.float32)
    return Completions(
        examples=[request.examples[row // 4] for row in range(8)],
        tokens=tokens,
        token_mask=token_mask,
        completion_mask=completion_mask,
        fields={"rollout_log_probs": np.where(completion_mask, log_probs, 0)},
        texts=["x"] * 8,
        finished=np.ones(8, bool),
        rewards={"reward": np.arange(8, dtype=np.float32), "correct": np.zeros(8, np.float32)},
        prompt_lengths=np.full(8, tiny.PROMPT, np.int32),
        episode_rows=np.array([0, 1, 1, -1, 4, 5, 6, -1], np.int32),
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The batch of a step, and the directory with its recording."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "mine.py").write_text(SOURCE)
    (folder / "rows").mkdir()
    source = f"rollout.source={folder / 'mine.py'}:make"
    context = tiny.context_of(tiny.config_of(SHAPE, source, f"rollout.record={folder / 'rows'}"))
    return collect(context, Stream(context, RowsOfEpisodes()), 0), folder / "rows"


def read(path, *options):
    source = f"rollout.source={{type: file, path: '{path}', shuffle: false}}"
    config = tiny.config_of(SHAPE, source, "rollout.fork_rows=1", "optim.share_prompts=false", *options)
    context = tiny.context_of(config)
    return collect(context, Stream(context, open_source(context)), 0)


def test_episodes_are_read_as_they_were_trained(recorded):
    before, path = recorded
    after = read(path)
    for name in ("token_mask", "completion_mask", "group_ids", "rewards", "rollout_log_probs"):
        np.testing.assert_array_equal(getattr(after.batch, name), getattr(before.batch, name), err_msg=name)
    mask = np.asarray(before.batch.token_mask)
    np.testing.assert_array_equal(np.asarray(after.batch.tokens)[mask], np.asarray(before.batch.tokens)[mask])
    np.testing.assert_array_equal(after.batch.episode_rows, before.completions.episode_rows)
    assert after.completions.metrics["reward"] == before.completions.metrics["reward"]
    assert after.completions.metrics["completion_length"] == before.completions.metrics["completion_length"]


def test_all_rows_of_episodes_are_sequences(recorded):
    lines = [json.loads(line) for line in next(recorded[1].glob("*.jsonl")).read_text().splitlines()]
    assert [line["kljax_format"] for line in lines] == [2] * 8
    assert lines[1]["trained"] == [False] * tiny.PROMPT + [True, False, False, True]
    assert [value is None for value in lines[1]["log_probs"]] == [not trained for trained in lines[1]["trained"]]
    assert [line.get("episode") for line in lines[1:4]] == [None, {"row": 1, "of": 4}, {"row": None, "of": 4}]
    assert not any("prompt_length" in line or "completion_ids" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("rollout.fork_rows=0",), "line 3: episode: got a fork of another row; set rollout.fork_rows"),
        (("rollout.samples_per_prompt=2",), "line 3: episode: got a group of 4, but rollout.samples_per_prompt is 2"),
    ],
)
def test_recording_that_does_not_fit_the_config_is_refused(recorded, options, message):
    with pytest.raises(UserError, match=message):
        read(recorded[1], *options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trained": [True]}, "trained: got 1 values, expected one for each of ids"),
        ({"trained": [1, 0, 0, 1]}, r"trained: got \[1, 0, 0, 1\], expected a list of true and false"),
        ({"episode": 3}, "episode: got 3, expected"),
        ({"episode": {"row": 4, "of": 4}}, "episode: got .*'row': 4.*, expected"),
    ],
)
def test_field_of_an_episode_that_is_wrong_is_named(recorded, tmp_path, changes, message):
    lines = [json.loads(line) for line in next(recorded[1].glob("*.jsonl")).read_text().splitlines()]
    lines[1] |= changes
    for line in lines:
        del line["kljax_check"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=f"line 2: {message}"):
        read(tmp_path / "rows.jsonl")


def test_observations_have_no_kept_ids(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "rows").mkdir()
    options = (f"rollout.source={tmp_path / 'mine.py'}:make", f"rollout.record={tmp_path / 'rows'}")
    context = tiny.context_of(tiny.config_of(SHAPE, *options))

    def with_kept(rows):
        kept = np.where(rows.completion_mask, rows.tokens, -1)[..., None]
        return dataclasses.replace(rows, fields=rows.fields | {"kept_ids": kept})

    before = collect(context, Stream(context, RowsOfEpisodes(with_kept)), 0)
    after = read(tmp_path / "rows")
    np.testing.assert_array_equal(after.batch.fields["kept_ids"], before.batch.fields["kept_ids"])
