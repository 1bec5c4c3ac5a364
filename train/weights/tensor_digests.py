"""Digests of the exports of this trainer, in `digests.json` beside them: of tensors and of the texts beside them.

Every load compares them.

Each tensor has the CRC-32 of its bytes, and so has the header of each file. The files of others have no digests.
"""

import functools
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kljax.checkpoint import first_five, text_hash
from train.weights.files import read_record, write_record

FILE_NAME = "digests.json"
HEADER = "its header"
LENGTH_BYTES = 8
HINT = "restore it from a copy, or delete it if the change is wanted"
CHANGED = f"restore it from a copy, or delete {FILE_NAME} if the change is wanted"
TEXTS = (".json", ".jinja", ".txt", ".model")
"""Suffixes of the files that say what the tensors mean: the scale of an adapter, the tokenizer, the chat template."""


def write_tensor_digests(folder: Path) -> None:
    """Writes the digests of all safetensors files of a folder, and of the texts that say what they mean."""
    files = {path.name: _file_digests(path) for path in sorted(folder.glob("*.safetensors"))}
    paths = (path for path in sorted(folder.iterdir()) if path.suffix in TEXTS and path.name != FILE_NAME)
    texts = {path.name: _text_digest(path) for path in paths}
    write_record(folder / FILE_NAME, {"files": files, "texts": texts})


def check_tensors(folder: str | Path) -> None:
    """Compares the files of a folder with its digests; a folder without digests passes.

    Within a process, an unchanged file is read once.

    Raises:
      FileNotFoundError: a file is gone.
      ValueError: a file is damaged; names it and its first tensors that differ.
      UserError: the digests are damaged.
    """
    record = Path(folder) / FILE_NAME
    if not record.is_file():
        return
    content = read_record(record, HINT)
    for name, digest in content.get("texts", {}).items():
        path = Path(folder) / name
        if not path.is_file() or _text_digest(path) != digest:
            problem = "is damaged: it differs from what" if path.is_file() else "is gone, although it"
            raise ValueError(f"{path} {problem} was exported; {CHANGED}")
    for name, expected in content["files"].items():
        path = Path(folder) / name
        status = path.stat()
        got = _cached_digests(path.resolve(), status.st_size, status.st_mtime_ns)
        differing = [tensor for tensor in expected.keys() | got.keys() if expected.get(tensor) != got.get(tensor)]
        if differing:
            names = first_five(sorted(differing), separator=", ")
            raise ValueError(f"{path} is damaged: got other bytes than were exported in {names}; {CHANGED}")


def _text_digest(path: Path) -> str:
    return text_hash(path.read_bytes()).hexdigest()


@functools.lru_cache(maxsize=256)
def _cached_digests(path: Path, size: int, modified: int) -> dict[str, str]:
    return _file_digests(path)


def _file_digests(path: Path) -> dict[str, str]:
    """Computes the digests of a file in parallel; bytes that are no tensor belong to the header."""
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
    ranges = {HEADER: (0, min(start, data.size))} | _tensor_ranges(data, start)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda bounds: f"{zlib.crc32(data[slice(*bounds)].data):08x}", ranges.values())
        return dict(zip(ranges, digests, strict=True))


def _tensor_ranges(data: np.ndarray, start: int) -> dict[str, tuple[int, int]]:
    """Reads where the tensors lie; none if the header is damaged, which its own digest tells."""
    try:
        header: dict[str, Any] = json.loads(data[LENGTH_BYTES:start].tobytes())
        tensors = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        return {name: (start + int(first), start + int(last)) for name, (first, last) in tensors.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
