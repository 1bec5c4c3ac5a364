import json
import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from train.config.errors import UserError
from train.run.metrics import MetricsWriter, finite_or_none, read_metrics


def record(directory, resume_step=None, *, first=1, last=4):
    writer = MetricsWriter(directory, resume_step)
    if resume_step is None:
        for step in range(1, 7):
            writer.write("warm_start", step, {"loss": 1 / step})
        writer.write("eval", 0, {"accuracy": 12.5})
    for step in range(first, last + 1):
        writer.write("train", step, {"reward": np.float32(step / 3), "loss": -0.1 * step, "entropy": math.pi**step})
        writer.timing(step, {"seconds": 0.25})
        if step % 2 == 0:
            writer.write("eval", step, {"accuracy": 100 / step})
    writer.close()
    return directory / "metrics.jsonl"


def scalars(directory, phase):
    """The (tag, step) pairs of every event file of a phase, and the steps from which earlier points are purged."""
    from tensorboardX import proto

    points, purged = [], []
    for path in sorted((directory / "tensorboard" / phase).glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = proto.event_pb2.Event.FromString(data[12 : 12 + length])
            points += [(value.tag, event.step) for value in event.summary.value]
            purged += [event.step] if event.HasField("session_log") and event.session_log.status == 1 else []
            data = data[16 + length :]
    return points, purged


def test_line_has_sorted_keys_and_every_digit(tmp_path):
    lines = record(tmp_path).read_text().splitlines()
    assert lines[6] == '{"accuracy": 12.5, "phase": "eval", "step": 0}'
    reward = float(np.float32(1 / 3))
    assert lines[7] == json.dumps({"entropy": math.pi, "loss": -0.1, "phase": "train", "reward": reward, "step": 1})
    assert json.loads(lines[10])["entropy"] == math.pi**3


def test_list_is_written_and_not_plotted(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("train", 1, {"tokens": [3, 0], "loss": 0.5})
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"phase": "train", "step": 1, "loss": 0.5, "tokens": [3, 0]}]
    assert [tag for tag, _ in scalars(tmp_path, "train")[0]] == ["policy/loss"]


def test_the_same_values_give_the_same_bytes(tmp_path):
    assert record(tmp_path / "a").read_bytes() == record(tmp_path / "b").read_bytes()


def test_a_fresh_run_replaces_an_earlier_one(tmp_path):
    expected = record(tmp_path).read_bytes()
    first_events = set(tmp_path.glob("tensorboard/*/*"))
    record(tmp_path, last=2)
    assert record(tmp_path).read_bytes() == expected
    assert len(set(tmp_path.glob("tensorboard/*/*"))) == len(first_events) == 3


def test_nan_and_infinity_are_null(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("train", 1, {"a": math.nan, "b": np.float32(np.inf), "c": -math.inf, "d": 1})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"a": null, "b": null, "c": null, "d": 1.0, "phase": "train", "step": 1}\n'
    )
    assert scalars(tmp_path, "train")[0] == [("other/d", 1)]
    assert finite_or_none(np.float64(0.1)) == 0.1


@pytest.mark.parametrize("resume_step", [0, 1, 2, 4])
def test_a_resumed_file_is_the_uninterrupted_one(tmp_path, resume_step):
    expected = record(tmp_path / "whole", last=6).read_bytes()
    path = record(tmp_path / "resumed")
    assert path.read_bytes() != expected
    record(tmp_path / "resumed", resume_step, first=resume_step + 1, last=6)
    assert path.read_bytes() == expected


def test_evaluations_are_known_to_a_resumed_run(tmp_path):
    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write("eval", 0, {"accuracy": 1.0})
        writer.write("train", 2, {"reward": 1.0})
        writer.write("eval", 4, {"accuracy": 2.0})
    with closing(MetricsWriter(tmp_path, resume_step=2)) as writer:
        assert [step for step in range(5) if writer.is_evaluated(step)] == [0]
        writer.write("eval", 2, {"accuracy": 1.5})
        assert writer.is_evaluated(2)


def test_resume_keeps_separately_counted_warm_start_steps(tmp_path):
    path = record(tmp_path)
    MetricsWriter(tmp_path, 1).close()
    assert [(r["phase"], r["step"]) for r in read_metrics(path)] == [
        *(("warm_start", step) for step in range(1, 7)),
        ("eval", 0),
        ("train", 1),
    ]


@pytest.mark.parametrize("torn", ['{"entropy": 1.0, "ph', '{"phase": "train", "reward": 1.0, "step": 1}', "\0\0\0"])
def test_a_half_written_last_line_is_dropped(tmp_path, torn):
    path = record(tmp_path)
    expected = path.read_bytes()
    with path.open("a") as file:
        file.write(torn)
    assert len(read_metrics(path)) == len(expected.splitlines())
    MetricsWriter(tmp_path, 4).close()
    assert path.read_bytes() == expected


def test_resume_without_a_file_creates_one(tmp_path):
    record(tmp_path / "run", 2, first=3, last=3)
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [3]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"step": 1}', '{"phase": "train", "step": "1"}'])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"phase": "train", "step": 1}}\n{line}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: "):
        read_metrics(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl: No such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_lines_are_on_disk_before_closing(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("train", 1, {"reward": 1.0})
    assert [r["reward"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]
    writer.close()


def test_unknown_phases_and_reserved_names_are_refused(tmp_path):
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match="phase: got 'test', expected one of warm_start, train, eval"):
        writer.write("test", 1, {})
    with pytest.raises(ValueError, match="step cannot name a metric"):
        writer.write("train", 1, {"step": 1.0})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_tensorboard_has_metrics_and_times_by_phase(tmp_path):
    record(tmp_path, last=2)
    points, purged = scalars(tmp_path, "train")
    tags = ("policy/entropy", "policy/loss", "reward/reward", "time/seconds")
    assert sorted(points) == sorted((tag, s) for s in (1, 2) for tag in tags)
    assert scalars(tmp_path, "eval")[0] == [("reward/accuracy", 0), ("reward/accuracy", 2)]
    assert [step for _, step in scalars(tmp_path, "warm_start")[0]] == [1, 2, 3, 4, 5, 6]
    assert purged == []
    assert "seconds" not in (tmp_path / "metrics.jsonl").read_text()


def test_resume_purges_later_points_not_earlier_files(tmp_path):
    record(tmp_path)
    record(tmp_path, 2, first=3, last=3)
    points, purged = scalars(tmp_path, "train")
    assert [step for tag, step in points if tag == "policy/loss"] == [1, 2, 3, 4, 3]
    assert purged == [3]
    assert scalars(tmp_path, "warm_start")[1] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_full_disk_under_tensorboard_alone_is_an_error(tmp_path, monkeypatch, recwarn):
    create = Path.open

    def on_full_disk(path, *arguments, **named):
        return create(Path("/dev/full") if "tfevents" in path.name else path, *arguments, **named)

    monkeypatch.setattr(Path, "open", on_full_disk)
    writer = MetricsWriter(tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        writer.write("train", 1, {"loss": 0.5})
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"phase": "train", "step": 1, "loss": 0.5}]
