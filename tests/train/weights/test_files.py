"""A write that fails, or is killed, leaves what was there as it was."""

import json
import os

import pytest

from kljax._files import write_text_atomic
from train.config.errors import UserError
from train.weights.files import new_directory, read_record, write_record


def test_failed_atomic_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text_atomic(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomic(path, "new\ud800")
    assert path.read_text() == "old\n"
    write_text_atomic(path, "new\n")
    assert path.read_text() == "new\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.txt"]


def test_new_directory_appears_complete_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "made"

    def interrupted() -> None:
        with new_directory(path) as partial:
            (partial / "one").write_text("1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert list(path.parent.iterdir()) == []
    path.mkdir()
    with new_directory(path) as partial:
        (partial / "one").write_text("1")
        assert list(path.iterdir()) == []
    assert [p.name for p in path.iterdir()] == ["one"]
    assert path.stat().st_mode == path.parent.stat().st_mode
    with pytest.raises(FileExistsError, match=f"{path} is there already"), new_directory(path):
        pass
    assert [p.name for p in path.parent.iterdir()] == ["made"]


def test_new_directory_leaves_the_mask_alone(tmp_path, monkeypatch):
    before = os.umask(0o027)
    try:
        # The mask belongs to the process: files that other threads create meanwhile would be open to all.
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail(f"the mask was set to {mask:o}"))
        with new_directory(tmp_path / "new"):
            pass
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o750
    finally:
        monkeypatch.undo()
        os.umask(before)


def test_a_record_without_digest_is_damaged(tmp_path):
    write_record(tmp_path / "sealed.json", {"folder": "/models"})
    assert read_record(tmp_path / "sealed.json", "restore it") == {"folder": "/models"}
    for content in ({"folder": "/models"}, ["/models"]):
        (tmp_path / "bare.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=r"bare\.json is damaged: it differs .* restore it"):
            read_record(tmp_path / "bare.json", "restore it")
