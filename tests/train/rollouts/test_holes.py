"""Rows with tokens between their completions, as episodes have: trained, but in no recording, which would move them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from tests import tiny
from tests.train.rollouts.test_user_source import right_rows
from train.rollouts.collect import collect
from train.rollouts.row_checks import has_holes
from train.rollouts.source import Completions, InTurn, Request, SourceError
from train.rollouts.stream import Stream
from train.run.recorder import RolloutRecorder, recorded_steps

SOURCE = "def make(context):\n    return None\n"


def with_hole(rows: Completions, row: int = 1) -> Completions:
    """Puts an observation of two tokens between two sampled ones, in one row."""
    token_mask, completion_mask = rows.token_mask.copy(), rows.completion_mask.copy()
    token_mask[row, tiny.PROMPT :] = True
    completion_mask[row, tiny.PROMPT + 1 : tiny.PROMPT + 3] = False
    completion_mask[row, tiny.PROMPT + 3] = True
    return dataclasses.replace(rows, token_mask=token_mask, completion_mask=completion_mask)


class Holed(InTurn):
    def __init__(self, change) -> None:
        super().__init__()
        self.sample = lambda request: change(right_rows(request))


def holed(context, change) -> Stream:
    return Stream(context, Holed(change))


def context_of(tmp_path, *options: str):
    (tmp_path / "mine.py").write_text(SOURCE)
    source = f"rollout.source={tmp_path / 'mine.py'}:make"
    config = tiny.config_of("rollout={prompts_per_step: 2, samples_per_prompt: 2}", source, *options)
    return tiny.context_of(config)


@pytest.mark.parametrize(
    ("tokens", "completion", "hole"),
    [
        ("00111100", "00001100", False),  # padding on both sides
        ("11111111", "00001111", False),
        ("11110000", "00000000", False),  # nothing was sampled
        ("11111110", "00010110", True),
        ("11111110", "00001100", True),  # an observation at the end
        ("11111011", "00001011", False),  # padding, which nobody reads
    ],
)
def test_hole_is_a_token_after_sampled_ones(tokens, completion, hole):
    token_mask, completion_mask = (np.array([[letter == "1" for letter in row]]) for row in (tokens, completion))
    assert has_holes(token_mask, completion_mask).tolist() == [hole]


def test_recording_refuses_holes_before_the_update(tmp_path):
    context = context_of(tmp_path, f"rollout.record={tmp_path / 'recorded'}")
    (tmp_path / "recorded").mkdir()
    with pytest.raises(SourceError, match=r"^rollout\.record: row 1 has tokens between .*; set rollout\.record=null$"):
        collect(context, holed(context, with_hole), 0)
    assert not list((tmp_path / "recorded").iterdir())
    collect(context, holed(context, lambda rows: rows), 0)
    assert [path.name for path in (tmp_path / "recorded").glob("*.jsonl")] == ["00000000.jsonl"]


def test_rows_with_holes_are_trained_as_they_are(tmp_path):
    context = context_of(tmp_path)
    rollout = collect(context, holed(context, with_hole), 0)
    expected = with_hole(right_rows(Request.of(context, 0)))
    np.testing.assert_array_equal(rollout.batch.completion_mask, expected.completion_mask)
    np.testing.assert_array_equal(rollout.batch.token_mask, expected.token_mask)
    assert rollout.metrics["completion_length"] == 2


def recorded(tmp_path, *changes) -> list[Path]:
    """The files of the page after a step with each of the changes."""
    context = context_of(tmp_path)
    recorder = RolloutRecorder(context, tmp_path / "rollouts", done=0)
    for step, change in enumerate(changes):
        rollout = collect(context, holed(context, change), step)
        recorder.record(step + 1, rollout, rollout.batch, [])
    recorder.close()
    return [tmp_path / "rollouts" / f"{step:08d}.parquet" for step in recorded_steps(tmp_path / "rollouts")]


def test_page_leaves_out_rows_with_holes(tmp_path, capsys):
    (file,) = recorded(tmp_path, with_hole)
    rows = parquet.read_table(file).to_pylist()
    assert [row["row"] for row in rows] == [0, 2, 3]
    assert [len(row["completion_ids"]) for row in rows] == [2, 2, 2]
    assert [row["prompt"] for row in rows] == [rows[0]["prompt"], *[rows[1]["prompt"]] * 2]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: report.rollouts: rows with tokens between their completions, ")


def test_step_of_holes_alone_has_no_file(tmp_path, capsys):
    def all_holes(rows):
        for row in range(4):
            rows = with_hole(rows, row)
        return rows

    files = recorded(tmp_path, all_holes, lambda rows: rows, with_hole)
    assert [file.name for file in files] == ["00000002.parquet", "00000003.parquet"]
    assert capsys.readouterr().err.count("report.rollouts") == 1
