"""The safetensors format: reading of headers and of rows of a tensor, and writing of a file tensor by tensor.

Reading and writing a few rows or one tensor at a time, the host needs a fraction of the largest tensor or of the file.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from train.weights.huggingface.mxfp4 import dequantise_mxfp4

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
# Bits of each dtype as an integer: all but the sign, and those of the exponent, all set in NaN and infinity alone.
BITS: Mapping[str, tuple[np.dtype, int, int]] = {
    "F32": (np.dtype(np.uint32), 0x7FFFFFFF, 0x7F800000),
    "F16": (np.dtype(np.uint16), 0x7FFF, 0x7C00),
    "BF16": (np.dtype(np.uint16), 0x7FFF, 0x7F80),
}
CHUNK_BYTES = 4 * 2**20
ALIGNMENT = 8


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """The part of a fused tensor [experts, ...] that belongs to one projection of one expert.

    Attributes:
      expert: number of the expert.
      first: the first row of the part; a column if `transposed`.
      step: the distance of its rows.
      transposed: whether the part is the transpose of rows in the file.
      scales: of blocks in mxfp4, whose rows the values have; None: the file has the values.
    """

    expert: int
    first: int = 0
    step: int = 1
    transposed: bool = False
    scales: "Tensor | None" = None

    def rows(self, stored: Any, start: int, count: int) -> np.ndarray:
        """Reads rows `start` to `start + count` of the part from a slice of an open file."""
        begin = self.first + self.step * start
        end = begin + self.step * (count - 1) + 1
        if self.transposed:
            return np.ascontiguousarray(stored[self.expert : self.expert + 1, :, begin:end][0][:, :: self.step].T)
        rows = stored[self.expert : self.expert + 1, begin:end][0][:: self.step]
        return rows if self.scales is None else dequantise_mxfp4(rows, self.scales.rows(start, count))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The header entry of one tensor.

    Attributes:
      dtype: name in the format, such as "F32" or "BF16".
      shape: of the tensor, or of the part of a fused one.
      part: of a fused tensor of experts; None: all of it.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    part: TensorPart | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the leading axis."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    def rows(self, start: int, count: int) -> np.ndarray:
        """Reads rows `start` to `start + count` into new memory.

        Raises:
          ValueError: the file is damaged; it has changed since its header was read.
        """
        # Opened for each piece: pages that stay mapped would count as memory of the process.
        with open_tensors(self.file) as file:
            stored = file.get_slice(self.name)
            return stored[start : start + count] if self.part is None else self.part.rows(stored, start, count)

    def check_finite(self, rows: np.ndarray) -> None:
        """Raises ValueError if rows of this tensor have a NaN or an infinity."""
        integer, unsigned, exponent = BITS[self.dtype]
        if np.max(rows.view(integer) & unsigned, initial=0) >= exponent:
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


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Opens a file and reads its header; raises ValueError unless its tensors cover its data, one by one."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path}: not a complete safetensors file; it is damaged or cut off ({error})") from None


def read_header(path: Path) -> dict[str, Tensor]:
    """Reads the header of a file: its tensors by name; raises ValueError as `open_tensors`."""
    with open_tensors(path) as file:
        slices = {name: file.get_slice(name) for name in sorted(file.keys())}
        return {name: Tensor(path, name, x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}


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
