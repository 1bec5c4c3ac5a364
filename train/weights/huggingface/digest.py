"""One string that says what is in a Hugging Face folder, so that a run continues with the weights it began with."""

import functools
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from train.weights.huggingface.contents import CONFIG, weight_files


def folder_digest(folder: str | Path) -> str:
    """SHA-256 over `config.json` and every byte of the weights, as "sha256:" and 64 digits.

    Files are read in parallel, at the speed of the disk; in one process a file that has not changed is read once.

    Raises:
      FileNotFoundError: no such folder, no `config.json`, or no safetensors in it.
    """
    folder = Path(folder)
    files = weight_files(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder}: expected {CONFIG}, but there is none")
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_now, [folder / CONFIG, *files]))
    # Without the names of the files: the same weights under other names are the same.
    return "sha256:" + hashlib.sha256("".join(digests).encode()).hexdigest()


def _now(path: Path) -> str:
    state = path.stat()
    return _file_digest(path.resolve(), state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _file_digest(path: Path, size: int, modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
