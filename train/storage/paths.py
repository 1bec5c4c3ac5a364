"""Paths of this machine, or in an object store; local ones need none of the packages of the stores."""

import argparse
import errno
import fnmatch
import functools
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from train.config.errors import UserError
from train.config.storage import COMMIT_FILE, address_problem, is_address, prepare_packages

if TYPE_CHECKING:
    ObjectPath = Path

_PACKAGES = ("aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "google", "s3fs", "ssl")
SHOWN = 200
"""Characters of an error of a store that are shown."""


class Status(NamedTuple):
    """The size of an object in bytes and the time of its last change, as `os.stat_result` names them."""

    st_size: int
    st_mtime: float


def as_path(path: str | os.PathLike[str], field: str = "") -> Path:
    """Returns a local path, or the path at an address in a store, which has the methods of `pathlib.Path` in use here.

    Raises:
      UserError: with the field: the address cannot be used, or the package of its store is missing.
    """
    if not is_address(path):
        return Path(path)
    text = os.fspath(path)
    if problem := address_problem(text):
        raise UserError(f"{f'{field}: ' if field else ''}got {text!r} ({problem})")
    made: Path = _path_class()(text)
    return made


def stored_argument(text: str) -> Path:
    """Reads an argument of a command line that may be an address in a store.

    Raises:
      ArgumentTypeError: the address cannot be used.
    """
    try:
        return as_path(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@contextmanager
def store_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns every error of a store inside the block into an OSError with the path and a reason in words."""
    name = os.fspath(path)
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such object or bucket", name) from error
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "it is there already", name) from error
    except PermissionError as error:
        raise PermissionError(errno.EACCES, f"the store refuses it: {_reason(error)}", name) from error
    except OSError as error:
        raise OSError(error.errno or errno.EIO, _reason(error), name) from error
    except Exception as error:
        if not is_store_error(error):
            raise
        raise OSError(errno.EIO, _reason(error), name) from error


def is_store_error(error: BaseException) -> bool:
    """Whether an error comes from a package that speaks to a store."""
    return any(kind.__module__.partition(".")[0] in _PACKAGES for kind in type(error).__mro__)


def _reason(error: BaseException) -> str:
    """Returns the first line of an error, without what only its class says."""
    text = (getattr(error, "strerror", None) or str(error)).strip()
    return re.sub(r"\s+", " ", text.splitlines()[0])[:SHOWN] if text else type(error).__name__


def filesystem(path: Path) -> Any:
    """Returns the file system of fsspec that has a path in a store."""
    import fsspec

    prepare_packages()
    with store_errors(path):
        return fsspec.core.url_to_fs(os.fspath(path))[0]


@functools.cache
def _path_class() -> Any:
    """Makes the class of paths in stores when the first one is asked for: it needs epath."""
    prepare_packages()
    from etils.epath.gpath import PosixGPath

    class ObjectPath(PosixGPath):
        """A path in an object store; every error is an OSError with the path and a reason.

        A directory is there as long as an object lies below it, and is not made. A file is written by one request, or
        by several that one completes: others see the old object or the new one, and an error leaves the old one.
        """

        @property
        def _fs(self) -> Any:
            return filesystem(self)

        def absolute(self) -> "ObjectPath":
            return self

        def resolve(self, strict: bool = False) -> "ObjectPath":
            return self

        def _entry(self) -> dict[str, Any] | None:
            """Returns what the store says of this path; None if nothing is there. Every other answer is an error."""
            try:
                with store_errors(self):
                    return dict(self._fs.info(str(self)))
            except FileNotFoundError:
                return None

        def exists(self) -> bool:
            return self._entry() is not None

        def is_dir(self) -> bool:
            return (self._entry() or {}).get("type") == "directory"

        def is_file(self) -> bool:
            return (self._entry() or {}).get("type") == "file"

        def is_symlink(self) -> bool:
            return False

        def stat(self) -> Status:
            with store_errors(self):
                entry = self._fs.info(str(self))
            changed = entry.get("LastModified") or entry.get("mtime") or entry.get("updated") or 0.0
            return Status(entry.get("size") or 0, changed.timestamp() if hasattr(changed, "timestamp") else 0.0)

        def iterdir(self) -> Iterator["ObjectPath"]:
            with store_errors(self):
                found = self._fs.ls(str(self), detail=False)
            names = sorted({entry.rstrip("/").rpartition("/")[2] for entry in found})
            yield from (self / name for name in names if name and name != self.name)

        def glob(self, pattern: str) -> Iterator["ObjectPath"]:
            """Yields what matches a pattern below this directory; none below one that is missing.

            The search of fsspec takes a directory that it may not list for an empty one.
            """
            first, _, rest = pattern.partition("/")
            if not set(first) & set("*?["):
                matching = [self / first] if rest or (self / first).exists() else []
            else:
                try:
                    matching = [entry for entry in self.iterdir() if fnmatch.fnmatchcase(entry.name, first)]
                except FileNotFoundError:
                    matching = []
            for entry in matching:
                yield from entry.glob(rest) if rest else (entry,)

        def read_bytes(self) -> bytes:
            with store_errors(self):
                return bytes(self._fs.cat_file(str(self)))

        def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
            return self.read_bytes().decode(encoding, errors)

        def write_bytes(self, data: bytes) -> int:
            with store_errors(self):
                self._fs.pipe_file(str(self), data)
            return len(data)

        def write_text(self, text: str, encoding: str = "utf-8", errors: str = "strict") -> int:
            return self.write_bytes(text.encode(encoding, errors))

        def open(self, mode: str = "r", *, encoding: str = "utf-8", errors: str = "strict", **_: Any) -> Any:
            """Opens an object for reading; one is written whole, by `write_bytes`."""
            if mode not in ("r", "rb"):
                raise ValueError(f"mode: got {mode!r}, expected 'r' or 'rb': an object is written whole")
            content = io.BytesIO(self.read_bytes())
            return content if mode == "rb" else io.TextIOWrapper(content, encoding=encoding, errors=errors)

        def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
            """Does nothing: a directory begins with its first object, and a bucket is never made."""

        def unlink(self, missing_ok: bool = False) -> None:
            with store_errors(self):
                if missing_ok and not self._fs.exists(str(self)):
                    return
                self._fs.rm_file(str(self))

        def samefile(self, other: Any) -> bool:
            return str(self) == str(other)

    return ObjectPath


def create_exclusively(path: Path, data: bytes) -> bool:
    """Writes an object unless one is there, as one request to the store; returns whether it was written.

    Raises:
      OSError: it cannot be written.
    """
    try:
        with store_errors(path):
            filesystem(path).pipe_file(os.fspath(path), data, mode="create")
    except FileExistsError:
        return False
    return True


def remove_tree(path: Path) -> None:
    """Deletes all below a directory in a store; what says that it is complete goes first."""
    with store_errors(path):
        files = filesystem(path)
        objects = [name for name in files.find(os.fspath(path)) if name]
        for name in sorted(objects, key=lambda name: (not name.endswith(f"/{COMMIT_FILE}"), name.count("/"))):
            files.rm_file(name)


def move_tree(path: Path, target: Path) -> None:
    """Moves a directory of a store: copies it, and then deletes it.

    Raises:
      OSError: a copy cannot be made.
    """
    with store_errors(path):
        files = filesystem(path)
        root = files._strip_protocol(os.fspath(path))
        for name in files.find(os.fspath(path)):
            files.cp_file(name, files._strip_protocol(f"{target}{name[len(root) :]}"))
    remove_tree(path)


def probe_store(directory: Path) -> None:
    """Writes and deletes an object in a directory of a store: rights differ from prefix to prefix.

    Raises:
      OSError: it cannot be written, as there is no such bucket, no right to write, or no room.
    """
    probe = directory / f".probe-{os.getpid()}-{os.urandom(4).hex()}"
    probe.write_bytes(b"probe")
    probe.unlink()


def check_bucket(directory: Path, field: str) -> None:
    """Raises `UserError` naming the field unless a directory of a store can be written."""
    bucket = os.fspath(directory).partition("://")[2].partition("/")[0]
    try:
        probe_store(directory)
    except FileNotFoundError:
        raise UserError(
            f"{field}: got {os.fspath(directory)!r}, but there is no bucket {bucket}; make it first"
        ) from None
    except OSError as error:
        raise UserError(f"{field}: cannot write {os.fspath(directory)}: {error.strerror}") from error
