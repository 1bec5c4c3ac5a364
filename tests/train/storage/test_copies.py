"""Files and folders in stores are read from copies, one for each state."""

import pytest

from tests.stores import FolderStore
from train.config.errors import UserError
from train.config.load import load
from train.storage.copies import local_copy, origin_of, with_local_copies
from train.storage.paths import as_path


def put(name, text):
    as_path(f"s3://bucket/{name}").write_text(text)


def test_folder_is_copied_once_for_each_state(store, monkeypatch):
    put("model/config.json", "{}")
    put("model/inner/a.txt", "a")
    put("model2/other.txt", "")
    first = local_copy("s3://bucket/model", "model.path")
    assert {path.relative_to(first).as_posix() for path in first.rglob("*") if path.is_file()} == {
        "config.json",
        "inner/a.txt",
    }
    assert first.name == "model"
    read = []
    monkeypatch.setattr(
        FolderStore, "fault", staticmethod(lambda op, path: read.append(path) if op == "read" else None)
    )
    assert local_copy("s3://bucket/model/", "model.path") == first
    assert not read
    put("model/inner/a.txt", "b")
    second = local_copy("s3://bucket/model", "model.path")
    assert second != first
    assert ((first / "inner/a.txt").read_text(), (second / "inner/a.txt").read_text()) == ("a", "b")
    assert origin_of(second / "inner/a.txt") == "s3://bucket/model/inner/a.txt"
    assert origin_of(first) == "s3://bucket/model"


def test_file_keeps_its_name(store):
    put("data/train.jsonl", "{}\n")
    copy = local_copy("s3://bucket/data/train.jsonl", "data.train")
    assert (copy.name, copy.read_text()) == ("train.jsonl", "{}\n")


def test_local_path_is_no_copy(tmp_path):
    assert local_copy(tmp_path, "model.path") == tmp_path
    assert origin_of(tmp_path / "a") == str(tmp_path / "a")


def test_nothing_there_is_named(store):
    with pytest.raises(UserError, match=r"^data.train: got 's3://bucket/none', but nothing is there"):
        local_copy("s3://bucket/none", "data.train")
    with pytest.raises(UserError, match=r"^data.train: cannot read s3://other/none: there is no such object or bucket"):
        local_copy("s3://other/none", "data.train")


def test_copy_that_is_cut_short_is_none(store, tmp_path, monkeypatch):
    put("model/config.json", "{}")
    put("model/weights", "w")

    def refuse(operation, path):
        if operation == "read" and path.endswith("weights"):
            raise PermissionError("Access Denied")

    monkeypatch.setattr(FolderStore, "fault", staticmethod(refuse))
    with pytest.raises(UserError, match=r"^model.path: cannot read s3://bucket/model: the store refuses it: Access"):
        local_copy("s3://bucket/model", "model.path")
    assert not list((tmp_path / "copies").iterdir())


def test_directory_of_copies_that_cannot_be_made_is_named(store, tmp_path, monkeypatch):
    put("model/config.json", "{}")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KLJAX_COPIES", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"^model.path: cannot copy s3://bucket/model: "):
        local_copy("s3://bucket/model", "model.path")


def test_config_has_copies_and_its_record_has_addresses(store):
    put("data/train.jsonl", "{}\n")
    overrides = ["task=jsonl", "data.reward=math:exp", "data.train=s3://bucket/data/train.jsonl"]
    config = load("smoke", [*overrides, "data.eval=s3://bucket/data/train.jsonl", "output=s3://bucket/runs"]).config
    copied = with_local_copies(config)
    assert copied.output == config.output == "s3://bucket/runs"
    assert origin_of(copied.data.train) == config.data.train == "s3://bucket/data/train.jsonl"
    assert copied.data.train == copied.data.eval
    assert with_local_copies(copied) is copied


def test_gguf_file_in_a_store_is_named(store):
    config = load("smoke", ["model=null", "model.path=s3://bucket/model.gguf"]).config
    with pytest.raises(UserError, match=r"^model.path: got 's3://bucket/model.gguf', a GGUF file in a store"):
        with_local_copies(config)


def test_missing_package_names_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for scheme, extra in (("s3", "s3"), ("gs", "gcs")):
        with pytest.raises(UserError, match=rf"run pip install 'kljax.train,{extra}.'"):
            load("smoke", [f"output={scheme}://bucket/runs"])
