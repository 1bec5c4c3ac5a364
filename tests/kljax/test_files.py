"""Files that a command writes where the user says: nothing of a run, no input and no device is lost."""

import os
import stat
import threading

import pytest

from kljax._files import (
    CONFIG_STARTS,
    RUN_ENTRIES,
    check_output,
    check_outside_of_runs,
    write_output,
    write_text_atomic,
)


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "runs" / "a"
    for name in ("checkpoints/0/state", "tensorboard/train", "samples"):
        (root / name).mkdir(parents=True)
    (root / "config.yaml").write_text(f"{CONFIG_STARTS[0]}0\nname: a\n")
    (root / "metrics.jsonl").write_text("{}\n")
    return root


@pytest.mark.parametrize("name", [*sorted(RUN_ENTRIES), "checkpoints/0/state/x", "samples/0.jsonl", "METRICS.JSONL"])
def test_file_of_a_run_is_no_output(run, name):
    with pytest.raises(ValueError, match=f"^--json: .* is a file of the run {run}, which would be lost"):
        check_output(run / name, option="--json")


@pytest.mark.parametrize("name", ["report.html", "notes.txt", "config.json", "mine/metrics.jsonl"])
def test_file_beside_those_of_a_run_is_an_output(run, name):
    (run / "mine").mkdir()
    check_output(run / name)
    write_output(run / name, "page")
    assert (run / name).read_text() == "page"


def test_links_and_dots_lead_to_the_file_of_the_run(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "out.json").symlink_to(run / "metrics.jsonl")
    for path in (tmp_path / "link" / "metrics.jsonl", tmp_path / "out.json", run / "samples" / ".." / "config.yaml"):
        with pytest.raises(ValueError, match="is a file of the run"):
            check_output(path)


def test_run_whose_config_or_metrics_are_gone_is_one(run):
    (run / "config.yaml").unlink()
    with pytest.raises(ValueError, match="is a file of the run"):
        check_output(run / "metrics.jsonl")
    (run / "metrics.jsonl").unlink()
    (run / ".lock").touch()
    with pytest.raises(ValueError, match="is a file of the run"):
        check_outside_of_runs(run / "checkpoints" / "x")


def test_names_of_run_files_elsewhere_are_free(tmp_path):
    (tmp_path / "config.yaml").write_text("name: a recipe\n")
    check_output(tmp_path / "summary.json")
    check_output(tmp_path / "config.yaml")


def test_input_is_no_output(tmp_path):
    path = tmp_path / "dump.npz"
    path.touch()
    (tmp_path / "same").hardlink_to(path)
    with pytest.raises(ValueError, match="is read by this command"):
        check_output(tmp_path / "same", [path])


def test_directory_or_missing_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match="is a directory; name a file"):
        check_output(tmp_path)
    with pytest.raises(ValueError, match="there is no directory"):
        check_output(tmp_path / "no" / "file")


def test_pipe_gets_the_text_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    check_output(pipe)
    write_output(pipe, "page")
    reader.join(10)
    assert read == ["page"]
    assert pipe.is_fifo()


def test_device_gets_the_text_and_stays(tmp_path):
    null = tmp_path / "null"
    try:
        os.mknod(null, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        null.write_text("x")
    except OSError:
        pytest.skip("needs root, and devices outside of /dev")
    check_output(null)
    write_output(null, "page")
    assert null.is_char_device()


def test_no_regular_file_is_ever_replaced(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="no regular file"):
        write_text_atomic(tmp_path / "metrics.jsonl", "text")
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="is a directory"):
        write_text_atomic(tmp_path / "directory", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "metrics.jsonl"]


def test_linked_file_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_output(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
