"""Rows with tokens between their completions, as episodes have: trained, and shown on the page of a run."""

import base64
import dataclasses
import json
import zlib
from pathlib import Path

import numpy as np
from pyarrow import parquet

from tests import tiny
from tests.train.rollouts.test_user_source import right_rows
from train.report.page import FAILURE_LINES, render
from train.report.rollouts import read_parquet
from train.report.runs import ShownRun
from train.rollouts.collect import collect
from train.rollouts.source import Completions, InTurn, Request
from train.rollouts.stream import Stream
from train.run.recorder import RolloutRecorder, recorded_steps
from train.sequences.sample import MOST_FAILURE_TEXT, Failure

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


def test_rows_with_holes_are_trained_as_they_are(tmp_path):
    context = context_of(tmp_path)
    rollout = collect(context, holed(context, with_hole), 0)
    expected = with_hole(right_rows(Request.of(context, 0)))
    np.testing.assert_array_equal(rollout.batch.completion_mask, expected.completion_mask)
    np.testing.assert_array_equal(rollout.batch.token_mask, expected.token_mask)
    assert rollout.completions.metrics["completion_length"] == 2


def recorded(tmp_path, *changes) -> list[Path]:
    """The files of the page after a step with each of the changes."""
    context = context_of(tmp_path)
    recorder = RolloutRecorder(context, tmp_path / "rollouts", done=0)
    for step, change in enumerate(changes):
        rollout = collect(context, holed(context, change), step)
        recorder.record(step + 1, rollout.completions, rollout.batch, [])
    recorder.close()
    return [tmp_path / "rollouts" / f"{step:08d}.parquet" for step in recorded_steps(tmp_path / "rollouts")]


def test_page_has_rows_with_observations(tmp_path):
    files = recorded(tmp_path, with_hole, lambda rows: rows)
    masks = [[row.get("completion_mask") for row in parquet.read_table(file).to_pylist()] for file in files]
    assert masks == [[[True] * 2, [True, False, False, True], [True] * 2, [True] * 2], [None] * 4]
    sample = read_parquet(files[0].parent, 10)
    holed = sample.rollouts[1]
    assert (holed.length, holed.sampled) == (4, [True, False, False, True])
    assert sample.rollouts[4].sampled is None
    page = render("a run", [ShownRun("a run", {}, {}, [], sample, [])])
    header = unpacked(page, 1)
    assert header["sampled"] == [1, 0, 0, 1]
    assert unpacked(page, 4)["sampled"] is None
    assert '"length":2,"episode":null' in page


def test_page_has_failures_with_the_first_lines_of_their_texts(tmp_path):
    text = "</script>\ud800\n" + "\n".join(map(str, range(2000)))
    world = Failure("world", "exception", text)
    policy = Failure("policy", "max_turns", "not over")
    files = recorded(
        tmp_path, lambda rows: dataclasses.replace(rows, failures=[None, world, policy, None]), lambda rows: rows
    )
    names = [parquet.read_schema(file).names for file in files]
    assert ["failure" in columns for columns in names] == [True, False]
    sample = read_parquet(files[0].parent, 10)
    failures = [rollout.failure for rollout in sample.rollouts]
    assert failures == [None, Failure(**world.recorded()), policy, *[None] * 5]
    assert len(failures[1].text) == MOST_FAILURE_TEXT
    metrics = {"train": {"episodes_failed_exception": [(1, 2.0), (2, 1.0)], "episodes_failed_ended": [(1, 0.0)]}}
    page = render("a run", [ShownRun("a run", metrics, {}, [], sample, [])])
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert data["runs"][0]["failed"] == {"exception": 3}
    shown = [rollout["failure"] for rollout in data["rollouts"]]
    lines = "\n".join(["</script>?", *map(str, range(FAILURE_LINES - 1)), "..."])
    assert shown[1] == {"of": "world", "name": "exception", "text": lines}
    assert shown[2] == {"of": "policy", "name": "max_turns", "text": "not over"}


def unpacked(page: str, index: int) -> dict:
    """The header of the tokens of a rollout in a page."""
    packed = page.partition(f'id="rollout-{index}">')[2].partition("<")[0]
    block = zlib.decompress(base64.b64decode(packed))
    return json.loads(block[4 : 4 + int.from_bytes(block[:4], "little")])
