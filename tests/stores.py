"""An object store that is a folder of this machine, for fsspec and TensorStore: no rename, no append, no lock."""

import contextlib
import functools
import hashlib
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from etils.epath import backend
from fsspec.spec import AbstractFileSystem

from kljax.checkpoint import _stores
from train.config import storage


class FolderStore(AbstractFileSystem):
    """Buckets are the folders below `root`; a directory is there as long as an object lies below it.

    Attributes:
      root: of the buckets, for all instances.
      fault: is called with the operation and the address before each request, and may raise.
      written: addresses of objects in the order in which they were written or deleted, the latter with a minus.
    """

    protocol = "s3"
    cachable = False
    root: Path
    fault: Callable[[str, str], None]
    written: list[str]
    _lock = threading.Lock()

    def _file(self, path: str, operation: str) -> Path:
        path = self._strip_protocol(path)
        type(self).fault(operation, path)
        return self.root / path

    def _bucket(self, path: str) -> None:
        if not (self.root / self._strip_protocol(path).split("/")[0]).is_dir():
            raise FileNotFoundError("The specified bucket does not exist")

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        file = self._file(path, "info")
        name = self._strip_protocol(path)
        if file.is_file():
            digest = hashlib.md5(file.read_bytes()).hexdigest()
            return {"name": name, "size": file.stat().st_size, "type": "file", "ETag": digest}
        if any(entry.is_file() for entry in file.rglob("*")):
            return {"name": name, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder = self._file(path, "ls")
        self._bucket(path)
        if folder.is_file():
            found = [self.info(path)]
        else:
            found = []
            for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
                with contextlib.suppress(FileNotFoundError):
                    found.append(self.info(str(entry.relative_to(self.root))))
            if not found:
                raise FileNotFoundError(path)
        return found if detail else [entry["name"] for entry in found]

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        """Lists the objects below a path as one request, as s3fs and gcsfs do."""
        detail = options.get("detail", False)
        if maxdepth is not None or withdirs:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, **options)
        folder = self._file(path, "ls")
        self._bucket(path)
        files = [folder] if folder.is_file() else sorted(entry for entry in folder.rglob("*") if entry.is_file())
        found = {entry["name"]: entry for entry in (self.info(str(file.relative_to(self.root))) for file in files)}
        return found if detail else list(found)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._file(path, "read").read_bytes()[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        file = self._file(path, "write")
        self._bucket(path)
        with self._lock:
            if mode == "create" and file.exists():
                raise FileExistsError(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f"{file.name}.{threading.get_ident()}")
            partial.write_bytes(value)
            partial.replace(file)
            self.written.append(self._strip_protocol(path))

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        Path(lpath).write_bytes(self.cat_file(rpath))

    def rm_file(self, path: str) -> None:
        self._file(path, "delete").unlink()
        self.written.append(f"-{self._strip_protocol(path)}")

    _rm = rm_file

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self.pipe_file(path2, self.cat_file(path1))

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Makes a bucket, as s3fs does, if it is asked to."""
        if create_parents or "/" not in self._strip_protocol(path):
            (self.root / self._strip_protocol(path).split("/")[0]).mkdir(exist_ok=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.mkdir(path)

    def rmdir(self, path: str) -> None:
        pass

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        for name in self.find(path):
            self.rm_file(name)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        return _Written(functools.partial(self.pipe_file, path))


class _Written(io.BytesIO):
    """A file whose content becomes an object when it is closed."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._write = write

    def close(self) -> None:
        if not self.closed:
            self._write(self.getvalue())
        super().close()


def no_fault(operation: str, path: str) -> None:
    """Lets every request pass."""


@contextlib.contextmanager
def folder_store(root: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Lets `s3://bucket` be the folder `root / "bucket"` inside the block, for the trainer and for orbax."""
    (root / "bucket").mkdir(parents=True)
    patch.setattr(FolderStore, "root", root, raising=False)
    patch.setattr(FolderStore, "fault", staticmethod(no_fault), raising=False)
    patch.setattr(FolderStore, "written", [], raising=False)
    patch.setitem(storage.STORES, "s3", storage.Store("a folder", "fsspec", "s3"))
    patch.setitem(sys.modules["fsspec.registry"]._registry, "s3", FolderStore)
    patch.setattr(
        _stores, "s3_driver", lambda bucket, path: {"driver": "file", "path": f"{root / bucket / path.lstrip('/')}"}
    )
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()
    try:
        yield root / "bucket"
    finally:
        backend._FileSystemSpecBackend._get_filesystem.cache_clear()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of `s3://bucket`; copies of objects are in a folder of the test."""
    monkeypatch.setenv("KLJAX_COPIES", os.fspath(tmp_path / "copies"))
    with folder_store(tmp_path / "store", monkeypatch) as bucket:
        yield bucket
