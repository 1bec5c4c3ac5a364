"""Writing of files that a library makes: beside their target and renamed into place, or uploaded as one object."""

import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from train.config.errors import warn
from train.config.storage import is_address
from train.storage.paths import filesystem, store_errors


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yields the path of a local file to write; when the block ends, `target` has its content at once.

    Raises:
      OSError: it cannot be written or uploaded; `target` is as it was.
    """
    if not is_address(target):
        partial = target.with_name(f"{target.name}.partial")
        try:
            yield partial
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return
    with tempfile.TemporaryDirectory(prefix="kljax-") as directory:
        # The name may tell a library the form of the file.
        partial = Path(directory) / target.name
        yield partial
        upload_file(partial, target)


def upload_file(file: Path, target: Path) -> None:
    """Uploads a file as one object: others see the old object or the new one.

    Raises:
      OSError: the store refuses it; the old object stays.
    """
    with store_errors(target):
        filesystem(target).put_file(str(file), str(target))


def upload_folder(folder: Path, target: Path, last: Sequence[str]) -> None:
    """Uploads the files of a folder, and those that readers look for, by their names, as the last.

    Raises:
      OSError: the store refuses one; what was uploaded is deleted as far as the store allows it.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    done: list[Path] = []
    try:
        for file in sorted(files, key=lambda path: path.name in last):
            done.append(target / file.relative_to(folder).as_posix())
            upload_file(file, done[-1])
    except BaseException:
        for path in reversed(done):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                break
        raise


class Mirror:
    """A local directory of files that are appended to, whose changed files are uploaded from time to time.

    A store has no append: each file is one object, which is written anew. `upload` writes all that has changed; a
    thread does the same between calls of `changed`, at most once in `seconds`, so that a reader sees a run go on.

    Attributes:
      local: the directory.
    """

    def __init__(self, target: Path, *, seconds: float = 15.0) -> None:
        """Starts with an empty local directory."""
        self.local = Path(tempfile.mkdtemp(prefix="kljax-"))
        self._target = target
        self._seconds = seconds
        self._states: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def changed(self) -> None:
        """Lets the thread upload what has changed, soon."""
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="uploads", daemon=True)
            self._thread.start()

    def upload(self) -> None:
        """Uploads all files that have changed.

        Raises:
          OSError: the store refuses one.
        """
        self._changed.clear()
        with self._lock:
            for file in sorted(path for path in self.local.rglob("*") if path.is_file()):
                name = file.relative_to(self.local).as_posix()
                state = file.stat().st_size, file.stat().st_mtime_ns
                if self._states.get(name) != state:
                    upload_file(file, self._target / name)
                    self._states[name] = state

    def _follow(self) -> None:
        told = False
        while not self._ended.wait(self._seconds):
            if self._changed.is_set():
                try:
                    self.upload()
                    told = False
                except OSError as error:
                    # The next save needs the store and says so; until then it may come back.
                    if not told:
                        warn(f"cannot write {error.filename or self._target}: {error.strerror}; tried again")
                    told = True

    def close(self) -> None:
        """Uploads what has changed, and deletes the local directory.

        Raises:
          OSError: the store refuses a file; the local directory stays, and the message names it.
        """
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.upload()
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; the files are in {self.local}", error.filename) from error
        shutil.rmtree(self.local, ignore_errors=True)
