"""A write that fails, or is killed, leaves the file as it was."""

import pytest

from train.files import write_text_atomic


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text_atomic(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomic(path, "new\ud800")
    assert path.read_text() == "old\n"
    write_text_atomic(path, "new\n")
    assert path.read_text() == "new\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.txt"]
