"""The header of a GGUF file: keys with their values, and where the tensors lie.

Every length is compared with the bytes that are there before anything is read, so that a damaged or hostile file costs
neither memory nor time. The reader of the package `gguf` checks no length, and makes two NumPy views of each string of
a vocabulary (160 MB for 49,152 tokens); its constants and its dequantization are used.
"""

import dataclasses
import itertools
import math
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Vocabularies and merges of 256,000 tokens take 10 MB.
MAX_HEADER_BYTES = 64 * 2**20
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 4
NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
# The smallest sizes of a key with its value and of the entry of a tensor.
KEY_BYTES = 8 + 4 + 1
ENTRY_BYTES = 8 + 4 + 8 + 4 + 8


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """The entry of one tensor.

    Attributes:
      shape: as in NumPy: the last axis is contiguous.
      offset: first byte, from the start of the file.
      nbytes: size in the file.
    """

    file: Path
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def data(self) -> np.ndarray:
        """Maps the bytes of the tensor, `[rows, bytes of a row]`."""
        rows = math.prod(self.shape[:-1])
        return np.memmap(self.file, np.uint8, "r", self.offset, (rows, self.nbytes // rows))


@dataclasses.dataclass(frozen=True)
class Header:
    """The keys and tensors of a file; an array of numbers is a NumPy array, an array of strings a list."""

    file: Path
    keys: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: str | Path) -> Header:
    """Reads and checks the header of a GGUF file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is no GGUF file of version 2 or 3, or is damaged or cut off; names the byte, key or tensor.
    """
    path = Path(path)
    with _bytes_of(path) as data:
        cursor = _Cursor(path, data)
        tensor_count, key_count = _counts(cursor)
        keys: dict[str, Any] = {}
        for _ in range(key_count):
            name = cursor.text("the name of a key", MAX_NAME_BYTES)
            if name in keys:
                raise cursor.error(f"duplicate key {name!r}")
            keys[name] = _value(cursor, name)
        entries: dict[str, _Entry] = {}
        for _ in range(tensor_count):
            entry = _entry(cursor)
            if entry.name in entries:
                raise cursor.error(f"duplicate tensor {entry.name!r}")
            entries[entry.name] = entry
        alignment = keys.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise cursor.error(f"general.alignment: got {alignment!r}, expected a power of two")
        start = math.ceil(cursor.position / alignment) * alignment
        tensors = {name: _tensor(path, entry, start, alignment, len(data)) for name, entry in entries.items()}
        _check_covered(path, list(tensors.values()), start, alignment, len(data))
    return Header(path, keys, tensors)


@contextmanager
def _bytes_of(path: Path) -> Iterator[mmap.mmap]:
    if not path.is_file():
        kind = "it is no file" if path.exists() else "there is no such file"
        raise FileNotFoundError(f"got {str(path)!r}, expected a GGUF file, but {kind}")
    if path.stat().st_size < len(MAGIC) + 4 + 16:
        raise ValueError(f"{path}: got {path.stat().st_size} bytes, which is no complete GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


class _Cursor:
    """A position in the header; each read checks that its bytes are there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.position = 0
        self._end = min(len(data), MAX_HEADER_BYTES)

    @property
    def remaining(self) -> int:
        """Bytes that the header may still have."""
        return self._end - self.position

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self._path}: no complete GGUF file: {problem}, at byte {self.position}")

    def take(self, count: int, what: str) -> bytes:
        """Reads `count` bytes; raises ValueError, naming `what`, if they are not there."""
        if count > self.remaining:
            limit = "the header may have" if len(self._data) > self._end else "the file has"
            raise self.error(f"{what} takes {count:,} bytes, and {limit} {self.remaining:,} more")
        piece = self._data[self.position : self.position + count]
        self.position += count
        return piece

    def unsigned(self, size: int, what: str) -> int:
        return int.from_bytes(self.take(size, what), "little")

    def text(self, what: str, longest: int = MAX_HEADER_BYTES) -> str:
        length = self.unsigned(8, what)
        if length > longest:
            raise self.error(f"{what} has {length:,} bytes, expected at most {longest:,}")
        piece = self.take(length, what)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 ({error.reason})") from None


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Reads the numbers of tensors and of keys; raises ValueError if it is another format, version or byte order."""
    if cursor.take(4, "the format") != MAGIC:
        raise cursor.error(f"the file does not begin with {MAGIC.decode()}")
    version = cursor.unsigned(4, "the version")
    if version and version & 0xFFFF == 0:
        raise cursor.error("it is big-endian; convert it to little-endian")
    if version not in VERSIONS:
        raise cursor.error(f"it has version {version}, expected {' or '.join(map(str, VERSIONS))}")
    tensors = cursor.unsigned(8, "the number of tensors")
    keys = cursor.unsigned(8, "the number of keys")
    for count, size, what in ((tensors, ENTRY_BYTES, "tensors"), (keys, KEY_BYTES, "keys")):
        if count * size > cursor.remaining:
            raise cursor.error(f"{count:,} {what} need more than the {cursor.remaining:,} bytes that follow")
    return tensors, keys


def _value(cursor: _Cursor, name: str) -> Any:
    kind = _value_type(cursor, name)
    if kind == GGUFValueType.STRING:
        return cursor.text(name)
    if kind != GGUFValueType.ARRAY:
        return _numbers(cursor, name, kind, 1)[0].item()
    inner = _value_type(cursor, name)
    count = cursor.unsigned(8, name)
    if inner == GGUFValueType.ARRAY:
        raise cursor.error(f"{name}: got an array of arrays, expected numbers or strings")
    if inner != GGUFValueType.STRING:
        return _numbers(cursor, name, inner, count)
    if 8 * count > cursor.remaining:
        raise cursor.error(f"{name} has {count:,} strings, which need more than the {cursor.remaining:,} bytes left")
    return [cursor.text(name) for _ in range(count)]


def _value_type(cursor: _Cursor, name: str) -> GGUFValueType:
    number = cursor.unsigned(4, name)
    try:
        return GGUFValueType(number)
    except ValueError:
        raise cursor.error(f"{name} has a value of the unknown type {number}") from None


def _numbers(cursor: _Cursor, name: str, kind: GGUFValueType, count: int) -> np.ndarray:
    dtype = np.dtype(NUMBERS[kind])
    piece = cursor.take(count * dtype.itemsize, name)
    if kind == GGUFValueType.BOOL and set(piece) - {0, 1}:
        raise cursor.error(f"{name} has a truth value that is neither 0 nor 1")
    return np.frombuffer(piece, dtype)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A tensor as the header describes it, unchecked: `sizes` begins with the contiguous axis."""

    name: str
    sizes: tuple[int, ...]
    kind: int
    offset: int


def _entry(cursor: _Cursor) -> _Entry:
    name = cursor.text("the name of a tensor", MAX_NAME_BYTES)
    count = cursor.unsigned(4, name)
    if not 1 <= count <= MAX_DIMENSIONS:
        raise cursor.error(f"the tensor {name!r} has {count} axes, expected 1 to {MAX_DIMENSIONS}")
    sizes = struct.unpack(f"<{count}Q", cursor.take(8 * count, name))
    return _Entry(name, sizes, cursor.unsigned(4, name), cursor.unsigned(8, name))


def _tensor(path: Path, entry: _Entry, start: int, alignment: int, file_bytes: int) -> GgufTensor:
    """Checks an entry against the format and the size of the file."""
    where = f"{path}: the tensor {entry.name!r}"
    try:
        kind = GGMLQuantizationType(entry.kind)
    except ValueError:
        raise ValueError(f"{where} has the unknown type {entry.kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(entry.sizes) < 1 or entry.sizes[0] % block:
        multiple = f", the first a multiple of {block}" if block > 1 else ""
        raise ValueError(f"{where} of type {kind.name} has axes {list(entry.sizes)}, expected sizes above 0{multiple}")
    nbytes = math.prod(entry.sizes) // block * block_bytes
    if entry.offset % alignment:
        raise ValueError(f"{where} begins at {entry.offset}, expected a multiple of {alignment}")
    if start + entry.offset + nbytes > file_bytes:
        raise ValueError(
            f"{where} takes bytes {start + entry.offset:,} to {start + entry.offset + nbytes:,}, but the file has "
            f"{file_bytes:,}; it is damaged or cut off"
        )
    return GgufTensor(path, entry.name, kind, entry.sizes[::-1], start + entry.offset, nbytes)


def _check_covered(path: Path, tensors: list[GgufTensor], start: int, alignment: int, file_bytes: int) -> None:
    """Raises ValueError if two tensors share bytes, or bytes belong to none: then a type or a shape is damaged.

    A tensor is followed by less than an alignment of padding.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for first, second in itertools.pairwise(ordered):
        if first.offset + first.nbytes > second.offset:
            raise ValueError(f"{path}: the tensors {first.name!r} and {second.name!r} overlap")
    ends = [
        (start, "the header"),
        *((tensor.offset + tensor.nbytes, f"the tensor {tensor.name!r}") for tensor in ordered),
    ]
    for (end, what), next_offset in zip(ends, [*(tensor.offset for tensor in ordered), file_bytes], strict=True):
        if next_offset - end >= alignment:
            raise ValueError(
                f"{path}: {next_offset - end:,} bytes after {what} belong to no tensor; the file is damaged"
            )
