"""The digest of a Hugging Face folder, with which a resumed run checks that its weights are unchanged."""

import functools
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from train.weights.files import file_digest
from train.weights.huggingface.contents import CONFIG, weight_files


def folder_digest(folder: str | Path) -> str:
    """Computes the SHA-256 of `config.json` and all weights, as "sha256:" and 64 digits.

    Files are read in parallel. Within a process, an unchanged file is read once.

    Raises:
      FileNotFoundError: the folder, its `config.json` or its safetensors files are missing.
    """
    folder = Path(folder)
    files = weight_files(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder}: expected {CONFIG}, but there is none")
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, [folder / CONFIG, *files]))
    # File names are not part of the digest: renamed weights are the same weights.
    return "sha256:" + hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(path: Path) -> str:
    status = path.stat()
    return _cached_digest(path.resolve(), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _cached_digest(path: Path, size: int, modified: int) -> str:
    return file_digest(path)
