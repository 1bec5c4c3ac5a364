"""The safetensors format: reading of headers and of rows of a tensor, and writing of a file tensor by tensor.

The safetensors library checks the header of a file, but it reads complete tensors. This module reads a few rows at a
time, so that the host needs a fraction of the largest tensor.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from train.config.json_text import parse_json

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
SIZES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
# Bits of each dtype as an integer: all but the sign, and those of the exponent, all set in NaN and infinity alone.
BITS: Mapping[str, tuple[np.dtype, int, int]] = {
    "F32": (np.dtype(np.uint32), 0x7FFFFFFF, 0x7F800000),
    "F16": (np.dtype(np.uint16), 0x7FFF, 0x7C00),
    "BF16": (np.dtype(np.uint16), 0x7FFF, 0x7F80),
}
CHUNK_BYTES = 4 * 2**20
ALIGNMENT = 8
# Maximum header size of the format; a larger number means another kind of file.
MAX_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The header entry of one tensor.

    Attributes:
      dtype: name in the format, such as "F32" or "BF16".
      start: its first byte in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the leading axis."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def rows(self, start: int, count: int) -> np.ndarray:
        """Reads rows `start` to `start + count` into new memory.

        Raises:
          ValueError: the file is too short; it has changed since its header was read.
        """
        dtype = DTYPES[self.dtype]
        with self.file.open("rb") as file:
            file.seek(self.start + start * self.row_bytes)
            block = np.fromfile(file, np.uint8, count * self.row_bytes)
        if block.size != count * self.row_bytes:
            raise ValueError(f"{self.file}: {self.name} is cut off")
        return block.view(dtype).reshape(count, *self.shape[1:])

    def check_finite(self, rows: np.ndarray) -> None:
        """Raises ValueError if rows of this tensor have a NaN or an infinity."""
        integer, unsigned, exponent = BITS[self.dtype]
        if (rows.view(integer) & unsigned).max(initial=0) >= exponent:
            raise ValueError(
                f"{self.file}: {self.name} has values that are not finite; restore the file, or set "
                "model.allow_nonfinite=true to load it as it is"
            )

    def pieces(self, chunk_bytes: int, *, parts: int = 1) -> list[tuple[int, int]]:
        """Splits the rows of each of `parts` equal parts into pieces, which have `chunk_bytes` in all parts or one row.

        Returns:
          The first row in the part and the number of rows of each piece.
        """
        rows = self.shape[0] // parts
        count = min(rows, max(1, math.ceil(rows * self.row_bytes * parts / chunk_bytes)))
        size = math.ceil(rows / count)
        return [(start, min(size, rows - start)) for start in range(0, rows, size)]


def read_header(path: Path) -> dict[str, Tensor]:
    """Reads the header of a file: its tensors by name.

    Raises:
      ValueError: the file is no safetensors file, is cut off, or tensors overlap or do not cover all of its data.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(f"{path}: no safetensors file, or a file that is cut off ({size} bytes)")
        try:
            header = parse_json(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
            ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path}: the header of this safetensors file cannot be read ({error})") from None
    beyond = sorted(name for name, end in ends.items() if end > size)
    if beyond:
        raise ValueError(f"{path}: cut off: {beyond[0]} ends at byte {ends[beyond[0]]}, the file at {size}")
    check_format(path)
    return tensors


def check_format(path: Path) -> None:
    """Raises ValueError unless the safetensors library accepts the header: tensors that cover the data, one by one."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path}: not a complete safetensors file: {error}") from None


def _tensor(path: Path, name: str, entry: Mapping, first: int) -> Tensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    width = DTYPES[entry["dtype"]].itemsize if entry["dtype"] in DTYPES else SIZES.get(entry["dtype"], 1)
    if end - begin != math.prod(shape) * width and entry["dtype"] in DTYPES:
        raise ValueError(f"{name}: {end - begin} bytes for {entry['dtype']}{list(shape)}")
    return Tensor(path, name, entry["dtype"], shape, first + begin)


def dtype_name(dtype: np.dtype) -> str:
    """Returns the name of a dtype in the format.

    Raises:
      ValueError: the dtype is not float32, float16 or bfloat16.
    """
    for name, supported in DTYPES.items():
        if supported == dtype:
            return name
    raise ValueError(f"dtype: got {np.dtype(dtype).name}, expected one of {', '.join(d.name for d in DTYPES.values())}")


def nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    """Computes the size of an array in bytes."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def write_file(
    path: Path, layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]], arrays: Iterable[np.ndarray]
) -> None:
    """Writes a file tensor by tensor in the order of `layout`, and syncs it to disk.

    Args:
      path: the file.
      layout: name -> dtype and shape.
      arrays: one array per name; an iterator is advanced only after the previous array is written.

    Raises:
      ValueError: an array differs from `layout` in dtype or shape, or its dtype is not supported.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in layout.items():
        end = offset + nbytes(dtype, shape)
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, (dtype, shape)), array in zip(layout.items(), arrays, strict=True):
            if array.dtype != dtype or array.shape != shape:
                raise ValueError(f"{name}: got {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}")
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
