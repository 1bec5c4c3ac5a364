"""Opens a dump: named arrays and a JSON header, from `.npz` or safetensors, without pickle and without loading it."""

import dataclasses
import json
import math
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from kljax._checks import closest
from kljax._npy import read_header
from kljax.tools.parity.fields import FIELDS, FORMAT, HEADER, METRIC, RESULT, field_of

MAX_HEADER = 100_000_000
# Results that later stages take as they are.
INPUT_TOO = ("log_probs", "ref_log_probs")
# A compressed member cannot be read in parts.
MAX_COMPRESSED = 1 << 28
# All that zipfile, zlib, struct and numpy raise for bytes that are no archive, no member or no header.
BROKEN = (
    *(OSError, ValueError, EOFError, RuntimeError, NotImplementedError, OverflowError, MemoryError, IndexError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
SAFETENSORS_DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1"},
}


class DumpError(ValueError):
    """A file that is no dump, or a field of it that is not as the schema has it."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in a file: where it lies, or the array itself if the file compresses it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: pathlib.Path
    offset: int = 0
    order: Any = "C"
    bfloat16: bool = False
    loaded: np.ndarray | None = None

    def part(self, *index: Any) -> np.ndarray:
        """Reads a part, `array[index]`; only its pages are loaded.

        Args:
          index: slices, integers or arrays, one per axis, or an ellipsis for the whole array.

        Returns:
          A NumPy array in the dtype of the file; bfloat16 becomes float32.
        """
        if self.loaded is not None:
            return np.asarray(self.loaded[index])
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)[index]
        source = np.memmap(self.path, np.dtype(self.dtype), "r", self.offset, self.shape, self.order)
        values = np.array(source[index])
        return (values.astype(np.uint32) << 16).view(np.float32) if self.bfloat16 else values

    @property
    def kind(self) -> str:
        """The name of its dtype."""
        return "bfloat16" if self.bfloat16 else np.dtype(self.dtype).name


class Dump:
    """A recorded batch: the header, and the arrays by the names of the schema."""

    def __init__(self, header: Mapping[str, Any], stored: Mapping[str, Stored]) -> None:
        self.header = dict(header)
        self._stored = dict(stored)
        self._check_header()
        self.sizes = self._check_shapes()
        self._check_contents()

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def stored(self, name: str) -> Stored:
        """Returns the place of an array in the file, without reading it.

        Raises:
          DumpError: if the dump has no such array.
        """
        if name not in self._stored:
            raise DumpError(f"{name}: the dump has no such array; it has {', '.join(self._stored) or 'none'}")
        return self._stored[name]

    def read(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Reads an array, or some of its rows.

        Args:
          rows: numbers of rows, for an array whose first axis is that of the batch; None reads the whole array.

        Returns:
          NumPy array of the recorded shape, or of the rows: float64, int64 for a field of whole numbers, booleans for
          the mask. Masked positions hold the recorded numbers.

        Raises:
          DumpError: if the dump has no such array.
        """
        values = self.stored(name).part(... if rows is None else rows)
        if name == "mask":
            return np.asarray(values != 0)
        return values.astype(np.int64 if field_of(name).whole_numbers else np.float64)

    def _check_header(self) -> None:
        version = self.header.get("kljax_parity")
        if version != FORMAT:
            raise DumpError(f"header.kljax_parity: got {version!r}, expected {FORMAT}, the version of the schema")
        for key in self.header:
            if key not in HEADER:
                raise DumpError(f"header.{key}: no such key; expected {', '.join(HEADER)}{closest(key, HEADER)}")
        for key in ("eos_id", "pad_id"):
            value = self.header.get(key)
            ids = value if key == "eos_id" and isinstance(value, list) else [value]
            if value is not None and not all(type(number) is int for number in ids):
                raise DumpError(f"header.{key}: got {value!r}, expected a token id")
        size = self.header.get("group_size")
        if size is not None and (type(size) is not int or size < 1):
            raise DumpError(f"header.group_size: got {size!r}, expected a number of rows")

    def _check_shapes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        sources: dict[str, str] = {}
        for name, array in self._stored.items():
            if name not in FIELDS and not name.startswith(METRIC):
                known = (*FIELDS, f"{METRIC}NAME")
                raise DumpError(f"{name}: no such field; expected {', '.join(known)}{closest(name, FIELDS)}")
            field = field_of(name)
            axes = field.axes if "columns" in self._stored else field.axes.replace("N", "T")
            axes = "B" if field.per_row and len(array.shape) == 1 else axes
            if len(array.shape) != len(axes):
                raise DumpError(f"{name}: got shape {list(array.shape)}, expected [{', '.join(axes)}]")
            if not name.isprintable():
                raise DumpError(f"{name!r}: got characters that cannot be printed, expected a printable name")
            for axis, size in zip(axes, array.shape, strict=True):
                if size < 1:
                    raise DumpError(f"{name}: got shape {list(array.shape)}, expected at least 1 along each axis")
                if sizes.setdefault(axis, size) != size:
                    other = f"{axis} is {sizes[axis]} in {sources[axis]}"
                    raise DumpError(f"{name}: got shape {list(array.shape)}, expected [{', '.join(axes)}]; {other}")
                sources.setdefault(axis, name)
            kind = "f" if array.bfloat16 else np.dtype(array.dtype).kind
            allowed = "iub" if field.whole_numbers and name != "mask" else "fiub"
            if kind not in allowed:
                wanted = "integers" if allowed == "iub" else "numbers"
                raise DumpError(f"{name}: got dtype {array.kind}, expected {wanted}")
        for name in ("log_probs", "mask"):
            if name not in self._stored:
                raise DumpError(f"{name}: missing; a dump needs log_probs and mask")
        return sizes

    def _check_contents(self) -> None:
        for name in {"mask", "tool_mask"} & set(self):
            values = self.stored(name).part(...)
            if (wrong := (values != 0) & (values != 1)).any():
                where = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise DumpError(f"{name}: got {values[where]} at (row, token) {where}, expected 0 or 1")
        mask = self.read("mask")
        for name, limit in (("rows", self.sizes["B"]), ("columns", self.sizes["T"])):
            if name in self and not ((numbers := self.read(name)) >= 0).all() & (numbers < limit).all():
                raise DumpError(f"{name}: got {numbers.tolist()}, expected {name} from 0 to {limit - 1}")
        for side in ("", "ref_"):
            if f"{side}hidden" in self and "head" not in self and f"{side}head" not in self:
                raise DumpError(f"{side}hidden: needs {side}head, the LM head; record it beside the hidden states")
            if (f"{side}hidden" in self or f"{side}logits" in self) and not ("rows" in self and "tokens" in self):
                raise DumpError(f"{side}logits: logits and hidden states need rows and tokens; record both")
        self._check_numbers(mask)
        self._check_positions(mask)

    def _check_numbers(self, trained: np.ndarray) -> None:
        """Checks that no number of a trained token, or of a row that has one, is NaN; an input is finite too."""
        for name in self:
            field = field_of(name)
            if field.whole_numbers or field.axes not in ("BT", "B"):
                continue
            values = self.stored(name).part(...)
            wrong = np.isnan(values) if field.kind == RESULT and name not in INPUT_TOO else ~np.isfinite(values)
            wrong &= trained if values.ndim == 2 else trained.any(-1)
            if wrong.any():
                where = tuple(int(i) for i in np.argwhere(wrong)[0])
                axes = "(row, token)" if len(where) == 2 else "row"
                raise DumpError(f"{name}: got {values[where]} at {axes} {where}, expected a finite number")

    def _check_positions(self, trained: np.ndarray) -> None:
        """Checks token ids of trained tokens, and lengths."""
        length = self.sizes["T"]
        vocabulary = self.sizes.get("V", 1 << 62)
        limits = {"tokens": vocabulary - 1, "prompt_lengths": length, "lengths": length}
        for name in limits.keys() & set(self):
            values = self.stored(name).part(...)
            wrong = (values < 0) | (values > limits[name])
            wrong &= trained if values.ndim == 2 else trained.any(-1)
            if wrong.any():
                where = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise DumpError(f"{name}: got {values[where]} at {where}, expected 0 to {limits[name]}")


def open_dump(path: str | pathlib.Path) -> Dump:
    """Opens an `.npz` or safetensors file and checks it against the schema.

    Arrays stay in the file unless it compresses them.

    Args:
      path: of the file; its first bytes tell the format.

    Raises:
      DumpError: naming the field that is not as the schema has it, or the file if it cannot be read.
    """
    path = pathlib.Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(4)
            return _open_npz(path, file) if start == b"PK\x03\x04" else _open_safetensors(path, file)
    except DumpError:
        raise
    except BROKEN as error:
        raise DumpError(f"{path}: cannot be read: {error}") from error


def write_dump(path: str | pathlib.Path, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Writes an uncompressed `.npz` dump.

    Args:
      path: of the file, which is overwritten.
      header: JSON values by the keys of `fields.HEADER`; the version of the schema is added.
      arrays: by the names of `fields.FIELDS`; they are not checked.
    """
    members: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items()}
    members["header"] = np.array(json.dumps({"kljax_parity": FORMAT, **header}))
    np.savez(pathlib.Path(path), **members)


def _open_npz(path: pathlib.Path, file: BinaryIO) -> Dump:
    header: Any = None
    stored: dict[str, Stored] = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name == info.filename:
                raise DumpError(f"{name}: is no array; an .npz file holds .npy members")
            array = _npz_member(path, archive, info, name)
            if name == "header":
                header = _parse_header(str(array.part()) if array.shape == () else "")
            elif name in stored:
                raise DumpError(f"{name}: the file holds it twice")
            else:
                stored[name] = array
    if header is None:
        raise DumpError("header: missing; store the JSON header as a string array named header")
    return Dump(header, stored)


def _npz_member(path: pathlib.Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> Stored:
    compressed = info.compress_type != zipfile.ZIP_STORED
    if compressed and info.file_size > MAX_COMPRESSED:
        raise DumpError(f"{name}: {info.file_size} bytes are compressed; store it with numpy.savez, uncompressed")
    try:
        with archive.open(info) as member:
            shape, fortran, dtype = read_header(member)
            begin = member.tell()
            if dtype.hasobject:
                raise DumpError(f"{name}: holds Python objects, which need pickle; store numbers")
            if math.prod(shape) * dtype.itemsize != info.file_size - begin:
                raise DumpError(f"{name}: {info.file_size - begin} bytes for shape {list(shape)} of {dtype}")
            if compressed or dtype.kind in "US":
                values = np.frombuffer(member.read(), dtype).reshape(shape, order="F" if fortran else "C")
                return Stored(name, shape, dtype.str, path, loaded=values)
    except DumpError:
        raise
    except BROKEN as error:
        raise DumpError(f"{name}: is not a NumPy array: {error}") from error
    return Stored(name, shape, dtype.str, path, _data_offset(path, info) + begin, "F" if fortran else "C")


def _data_offset(path: pathlib.Path, info: zipfile.ZipInfo) -> int:
    """Returns where the bytes of a stored member begin: after its local header, whose last fields may vary in size."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        local = file.read(30)
    name_size, extra_size = struct.unpack("<HH", local[26:30])
    return info.header_offset + 30 + int(name_size) + int(extra_size)


def _open_safetensors(path: pathlib.Path, file: BinaryIO) -> Dump:
    total = path.stat().st_size
    file.seek(0)
    prefix = file.read(8)
    size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= size <= min(MAX_HEADER, total - 8):
        raise DumpError(f"{path}: is neither an .npz nor a safetensors file")
    try:
        index = json.loads(file.read(size))
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path}: is neither an .npz nor a safetensors file: {error}") from error
    if not isinstance(index, dict):
        raise DumpError(f"{path}: is neither an .npz nor a safetensors file: its header is no JSON object")
    entries = {name: entry for name, entry in index.items() if name != "__metadata__"}
    metadata = index.get("__metadata__", {})
    stored = {name: _safetensors_member(path, name, entry, 8 + size, total) for name, entry in entries.items()}
    if not isinstance(metadata, dict) or not isinstance(metadata.get("header"), str):
        raise DumpError("header: missing; store the JSON header as the metadata entry named header")
    return Dump(_parse_header(metadata["header"]), stored)


def _safetensors_member(path: pathlib.Path, name: str, entry: Any, start: int, total: int) -> Stored:
    try:
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        kind = entry["dtype"]
        dtype = np.dtype(SAFETENSORS_DTYPES[kind])
        if not isinstance(entry["shape"], list) or any(type(number) is not int for number in (*shape, begin, end)):
            raise ValueError("a size that is no integer")
    except (KeyError, TypeError, ValueError) as error:
        known = ", ".join(SAFETENSORS_DTYPES)
        raise DumpError(f"{name}: got {entry!r}, expected a shape, offsets and a dtype of {known}") from error
    if min((begin, *shape), default=0) < 0 or start + end > total or end - begin != math.prod(shape) * dtype.itemsize:
        raise DumpError(f"{name}: bytes {begin} to {end} do not hold shape {list(shape)} of {kind}")
    return Stored(name, shape, dtype.str, path, start + begin, bfloat16=kind == "BF16")


def _parse_header(text: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"header: is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise DumpError(f"header: got {type(header).__name__}, expected a JSON object")
    return header
