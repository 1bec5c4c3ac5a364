"""A recording with rewards is all that a run needs: no task, no data, no reward function, no evaluation."""

import copy
import json

import numpy as np
import pytest
import yaml

from tests import tiny
from tests.train.config.built import build, problems
from train.config.errors import UserError
from train.config.load import dump_yaml, parse
from train.config.types import RECORDING
from train.data.prompts import Prompts
from train.data.tasks import load_task
from train.data.tokenizers import ByteTokenizer
from train.rollouts.collect import collect
from train.rollouts.open import open_stream

EOS = ByteTokenizer().eos_id
ROWS = [{"prompt_ids": [1, 2 + i // 2], "completion_ids": [3, EOS], "reward": i % 2} for i in range(16)]


def write(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_of(path):
    return f"rollout.source={{type: file, path: {path}, shuffle: false}}"


def replayed(path, *overrides):
    """The context of a config that names a recording and no task."""
    raw = copy.deepcopy({name: x for name, x in tiny.RAW.items() if name not in ("task", "warm_start", "eval")})
    return tiny.context_of(build(source_of(path), *overrides, **raw)[0])


def test_recording_is_the_task_unless_one_is_set(tmp_path):
    path = write(tmp_path / "a.jsonl")
    config, _ = build(source_of(path))
    assert (config.task, config.eval.prompts, config.warm_start.steps) == (RECORDING, 0, 0)
    assert parse(yaml.safe_load(dump_yaml(config)))[0] == config
    scored, _ = build(source_of(path), "task=arithmetic")
    assert (scored.task, scored.eval.prompts, scored.warm_start.steps) == ("arithmetic", 256, 300)
    assert build()[0].task == "arithmetic"
    assert load_task(config).train == ()


def test_recorded_rewards_and_prompts_are_trained_on(tmp_path):
    context = replayed(write(tmp_path / "a.jsonl"))
    assert context.prompts.batch(3) == []
    source = open_stream(context)
    for step in range(2):
        batch = collect(context, source, step).batch
        np.testing.assert_array_equal(batch.rewards, [0, 1] * 4)
        np.testing.assert_array_equal(batch.tokens[::2, 1], np.arange(4) + 2 + 4 * step)


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (("task=recording",), "task: got recording, but rollout.source.type jax brings no rewards; set it to file"),
        (("FILE", "eval.prompts=5"), "eval.prompts: got 5, but task recording has no examples; set it to 0, or set a"),
        (("FILE", "warm_start.steps=5"), "warm_start.steps: got 5, but task recording has no examples; set it to 0"),
        (("FILE", f"data.train={__file__}"), f"data.train: got '{__file__}', but task recording has the prompts of"),
        (("FILE", "data.reward=a:b"), "data.reward: task recording does not read it, only jsonl"),
        (("eval=3",), "eval: got 3, expected a mapping with every, prompts, batch_size, greedy"),
    ],
)
def test_field_without_use_in_a_replay_is_refused(tmp_path, overrides, start):
    file = source_of(write(tmp_path / "a.jsonl"))
    (line,) = problems(*(file if override == "FILE" else override for override in overrides))
    assert line.startswith(start)


def test_unread_data_may_be_missing(tmp_path):
    jsonl = ("task=jsonl", "data.reward=a:b", "warm_start.steps=0")
    config, _ = build(*jsonl, f"data.train={write(tmp_path / 'a.jsonl')}", "eval=null")
    assert config.eval.prompts == config.eval.rows() == 0
    assert (
        build(*jsonl, f"data.train={__file__}", "eval=false")[0]
        == build(*jsonl, f"data.train={__file__}", "eval=null")[0]
    )
    build(*jsonl, source_of(tmp_path / "a.jsonl"), f"data.eval={tmp_path / 'a.jsonl'}")
    (line,) = problems(*jsonl[:2], source_of(tmp_path / "a.jsonl"), "eval=null", "warm_start.steps=5")
    assert line.startswith("data.train: missing")


def test_evaluation_without_prompts_divides_nothing():
    (line,) = problems("mesh.data=3", "warm_start.batch_size=3", "rollout.prompts_per_step=3")
    assert line.startswith("eval.batch_size: got 128, expected a multiple of mesh.data")
    build("mesh.data=3", "warm_start.batch_size=3", "rollout.prompts_per_step=3", "eval=null")


def test_rows_without_rewards_need_a_task(tmp_path):
    rows = [{name: value for name, value in row.items() if name != "reward"} for row in ROWS]
    context = replayed(write(tmp_path / "a.jsonl", rows))
    with pytest.raises(
        UserError, match=r"rollout\.source\.path: the rows of .* have no rewards; add them, or set a task"
    ):
        open_stream(context)


def test_weight_of_an_unrecorded_reward_is_an_error(tmp_path):
    context = replayed(write(tmp_path / "a.jsonl"), "rewards.weights={style: 1.0}")
    with pytest.raises(UserError, match=r"rewards\.weights: got 'style', expected some of reward"):
        open_stream(context)


def test_longest_rows_are_named_with_dropped_groups(tmp_path, caplog):
    long = {"prompt_ids": [1] * 9, "completion_ids": [3] * 7, "reward": 1}
    open_stream(replayed(write(tmp_path / "a.jsonl", [*ROWS, long, long])))
    assert "1 of 9 groups are longer than data.max_prompt_length = 5" in caplog.text
    assert "the longest prompt has 9 tokens, the longest completion 7" in caplog.text


def test_recorded_padding_tokens_are_warned_of(tmp_path, capsys, monkeypatch):
    context = replayed(write(tmp_path / "a.jsonl"))
    monkeypatch.setattr("train.rollouts.recorded.source.trained_pad", lambda _: 2)
    open_stream(context)
    assert "2 of 16 recorded rows have token 2, the pad_token_id of config.json" in capsys.readouterr().err


def test_prompts_without_examples_are_none():
    assert Prompts((), ByteTokenizer(), length=4, batch_size=2, seed=0).batch(0) == []
