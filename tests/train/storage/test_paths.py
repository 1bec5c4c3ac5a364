"""Paths in a store have the methods of local ones, and every error is an OSError with a reason."""

import errno
import subprocess
import sys

import pytest

from tests.stores import FolderStore
from train.config.errors import UserError
from train.config.storage import is_address
from train.storage.paths import as_path, check_bucket, create_exclusively, move_tree, remove_tree
from train.storage.uploads import Mirror, upload_folder, whole_file
from train.weights.files import new_directory


def test_local_path_stays_one(tmp_path):
    assert type(as_path("runs")) is type(tmp_path)
    assert as_path(tmp_path) is tmp_path or as_path(tmp_path) == tmp_path
    assert not is_address(as_path("runs"))


def test_object_is_read_as_written(store):
    path = as_path("s3://bucket/a/b.txt")
    assert not path.exists()
    assert path.write_text("é\n") == 3
    assert (path.read_text(), path.read_bytes()) == ("é\n", "é\n".encode())
    assert (path.is_file(), path.is_dir(), path.parent.is_dir(), path.parent.is_file()) == (True, False, True, False)
    assert path.stat().st_size == 3
    with path.open(encoding="utf-8", errors="replace") as file:
        assert list(file) == ["é\n"]
    assert path.absolute() == path.resolve() == path
    assert str(path.with_name("c")) == "s3://bucket/a/c"
    assert [str(entry) for entry in path.parent.iterdir()] == ["s3://bucket/a/b.txt"]
    assert [str(entry) for entry in path.parent.glob("*.txt")] == ["s3://bucket/a/b.txt"]
    assert list(as_path("s3://bucket/none").glob("*")) == []
    path.unlink()
    path.unlink(missing_ok=True)
    assert not path.parent.exists()
    with pytest.raises(FileNotFoundError, match=r"no such object"):
        path.unlink()


def test_directory_is_not_made(store):
    as_path("s3://bucket/a").mkdir(parents=True, exist_ok=True)
    as_path("s3://other/a").mkdir(parents=True, exist_ok=True)
    assert list(store.parent.iterdir()) == [store]


@pytest.mark.parametrize(
    ("error", "kind", "number"),
    [
        (PermissionError("Access Denied"), PermissionError, errno.EACCES),
        (OSError(errno.EBUSY, "Please reduce your request rate"), OSError, errno.EBUSY),
        (TimeoutError(), OSError, errno.EIO),
        (type("EndpointConnectionError", (Exception,), {"__module__": "botocore.exceptions"})("gone"), OSError, 5),
    ],
)
def test_error_of_store_has_path_and_reason(store, monkeypatch, error, kind, number):
    def fault(operation, path):
        raise error

    monkeypatch.setattr(FolderStore, "fault", staticmethod(fault))
    path = as_path("s3://bucket/a")
    for act in (path.exists, path.read_bytes, lambda: path.write_bytes(b""), lambda: list(path.glob("*"))):
        with pytest.raises(kind) as caught:
            act()
        assert (caught.value.errno, caught.value.filename) == (number, "s3://bucket/a")
        assert caught.value.strerror


def test_error_of_ours_stays(store, monkeypatch):
    def fault(operation, path):
        raise ZeroDivisionError

    monkeypatch.setattr(FolderStore, "fault", staticmethod(fault))
    with pytest.raises(ZeroDivisionError):
        as_path("s3://bucket/a").exists()


def test_one_of_two_creates(store):
    path = as_path("s3://bucket/lock")
    assert [create_exclusively(path, b"first"), create_exclusively(path, b"second")] == [True, False]
    assert path.read_bytes() == b"first"


def test_missing_bucket_is_named(store):
    with pytest.raises(UserError, match=r"^output: got 's3://other/runs', but there is no bucket other; "):
        check_bucket(as_path("s3://other/runs"), "output")
    check_bucket(as_path("s3://bucket/runs"), "output")
    assert list(store.rglob("*.probe*")) == []


def test_tree_moves_and_its_commit_file_goes_first(store):
    root = as_path("s3://bucket/checkpoints/3")
    for name in ("state/d/1", "state/commit_success.txt", "commit_success.txt", "_METADATA"):
        (root / name).write_text(name)
    FolderStore.written.clear()
    move_tree(root, as_path("s3://bucket/damaged/3-0"))
    assert not root.exists()
    assert (as_path("s3://bucket/damaged/3-0") / "state/d/1").read_text() == "state/d/1"
    deleted = [name for name in FolderStore.written if name.startswith("-")]
    assert deleted[0] == "-bucket/checkpoints/3/commit_success.txt"
    remove_tree(as_path("s3://bucket/damaged"))
    assert not as_path("s3://bucket/damaged").exists()


@pytest.mark.parametrize("target", ["s3://bucket/a.bin", "{}/a.bin"])
def test_file_is_whole_or_as_before(store, tmp_path, target):
    path = as_path(target.format(tmp_path))
    with whole_file(path) as partial:
        partial.write_bytes(b"first")
    assert path.read_bytes() == b"first"

    def interrupted():
        with whole_file(path) as partial:
            partial.write_bytes(b"sec")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in path.parent.iterdir() if "partial" in entry.name] == []


def test_folder_ends_with_its_manifest_or_is_taken_back(store, tmp_path, monkeypatch):
    for name in ("config.json", "a.safetensors", "z/tokenizer.json"):
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_text(name)
    upload_folder(tmp_path / "folder", as_path("s3://bucket/model"), ("config.json",))
    assert FolderStore.written[-1] == "bucket/model/config.json"
    assert as_path("s3://bucket/model/z/tokenizer.json").read_text() == "z/tokenizer.json"

    def full(operation, path):
        if operation == "write" and path.endswith("z/tokenizer.json"):
            raise OSError(errno.ENOSPC, "The bucket is full")

    monkeypatch.setattr(FolderStore, "fault", staticmethod(full))
    with pytest.raises(OSError, match=r"full"):
        upload_folder(tmp_path / "folder", as_path("s3://bucket/second"), ("config.json",))
    assert not as_path("s3://bucket/second").exists()


def test_new_directory_may_have_a_marker_in_a_store(store, monkeypatch):
    # Consoles of stores make an empty object for a directory, which only the listing of the directory has.
    monkeypatch.setattr(FolderStore, "info", lambda self, path: {"name": path, "size": 0, "type": "directory"})
    monkeypatch.setattr(FolderStore, "ls", lambda self, path, detail: [f"{path}/"])
    with new_directory(as_path("s3://bucket/model")) as folder:
        (folder / "config.json").write_text("{}")
    assert FolderStore.written == ["bucket/model/config.json"]


def test_mirror_uploads_what_has_changed(store):
    mirror = Mirror(as_path("s3://bucket/run"), seconds=0.01)
    (mirror.local / "a").write_text("1")
    (mirror.local / "b").write_text("1")
    mirror.upload()
    (mirror.local / "b").write_text("12")
    FolderStore.written.clear()
    mirror.upload()
    assert FolderStore.written == ["bucket/run/b"]
    (mirror.local / "a").write_text("123")
    mirror.changed()
    for _ in range(1000):
        if FolderStore.written[-1:] == ["bucket/run/a"]:
            break
        mirror._ended.wait(0.01)
    assert as_path("s3://bucket/run/a").read_text() == "123"
    mirror.close()
    assert not mirror.local.exists()


def test_mirror_keeps_what_store_refuses(store, monkeypatch):
    mirror = Mirror(as_path("s3://bucket/run"))
    (mirror.local / "a").write_text("1")

    def refuse(operation, path):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(FolderStore, "fault", staticmethod(refuse))
    with pytest.raises(PermissionError, match=r"the files are in"):
        mirror.close()
    assert (mirror.local / "a").read_text() == "1"


def test_paths_of_stores_load_no_jax():
    """The supervisor looks into the directory of a run, too."""
    code = (
        "import sys, train.config.storage as s; s.STORES['s3'] = s.Store('a store', 'fsspec', 's3'); "
        "from train.storage.paths import as_path; from train.run.paths import RunPaths; "
        "RunPaths(as_path('s3://bucket/run')); print('jax' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
