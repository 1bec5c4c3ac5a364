"""The safetensors format: what a file holds, rows of one tensor, and a file written tensor by tensor.

The library that is named after the format maps the file into memory or reads tensors whole. Here a few rows are read
at a time, so that the host needs a fraction of the largest tensor.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
SIZES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
ALIGNMENT = 8
# What the format allows a header to have; a larger number means that this is another kind of file.
MAX_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file, which is not read yet.

    Attributes:
      dtype: as the format calls it, "F32" or "BF16" say.
      start: its first byte in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the leading axis."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def rows(self, start: int, count: int) -> np.ndarray:
        """Rows `start` to `start + count`, in memory of their own.

        Raises:
          ValueError: the file ends before them; it has changed since its header was read.
        """
        dtype = DTYPES[self.dtype]
        with self.file.open("rb") as file:
            file.seek(self.start + start * self.row_bytes)
            block = np.fromfile(file, np.uint8, count * self.row_bytes)
        if block.size != count * self.row_bytes:
            raise ValueError(f"{self.file}: {self.name} is cut off")
        return block.view(dtype).reshape(count, *self.shape[1:])


def read_header(path: Path) -> dict[str, Tensor]:
    """What a file holds, by name.

    Raises:
      ValueError: no safetensors file, or one that is cut off.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(f"{path}: no safetensors file, or one that is cut off ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
            ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path}: the header of this safetensors file cannot be read ({error})") from None
    late = sorted(name for name, end in ends.items() if end > size)
    if late:
        raise ValueError(f"{path}: cut off: {late[0]} ends at byte {ends[late[0]]}, the file at {size}")
    return tensors


def _tensor(path: Path, name: str, entry: Mapping, first: int) -> Tensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    width = DTYPES[entry["dtype"]].itemsize if entry["dtype"] in DTYPES else SIZES.get(entry["dtype"], 1)
    if end - begin != math.prod(shape) * width and entry["dtype"] in DTYPES:
        raise ValueError(f"{name}: {end - begin} bytes for {entry['dtype']}{list(shape)}")
    return Tensor(path, name, entry["dtype"], shape, first + begin)


def dtype_name(dtype: np.dtype) -> str:
    """What the format calls a dtype.

    Raises:
      ValueError: none of float32, float16 and bfloat16.
    """
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"dtype: got {np.dtype(dtype).name}, expected one of {', '.join(d.name for d in DTYPES.values())}")


def nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of an array."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def write_file(
    path: Path, layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]], arrays: Iterable[np.ndarray]
) -> None:
    """Writes a file whose tensors come one after the other, in the order of `layout`, and syncs it to the disk.

    Args:
      layout: name -> dtype and shape, known before the arrays are.
      arrays: one for each name; each is asked for when the one before it has been written.

    Raises:
      ValueError: an array of another dtype or shape than announced, or of a dtype that is not written.
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
