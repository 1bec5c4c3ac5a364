"""The schema of a dump, and its reader: named arrays and a JSON header, without pickle and without loading them."""

import dataclasses
import json
import math
import pathlib
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from kljax._checks import closest
from kljax._npy import BROKEN, read_header

FORMAT = 1
RESULT = "result"
INPUT = "input"
METRIC = "metric/"


@dataclasses.dataclass(frozen=True)
class Field:
    """An array of a dump; a result is recomputed and compared.

    Its axes are B rows, T tokens, R rows and N positions whose logits are recorded, V vocabulary, D model width, L
    layers with experts, K experts of a token.
    """

    axes: str
    kind: str
    text: str
    whole_numbers: bool = False
    per_row: bool = False  # `[B]` in place of `[B, T]` is accepted


FIELDS: dict[str, Field] = {
    "tokens": Field("BT", INPUT, "token ids", whole_numbers=True),
    "prompt_lengths": Field("B", INPUT, "position of the first completion token", whole_numbers=True),
    "lengths": Field("B", INPUT, "position after the last token, the end-of-sequence token included", True),
    "tool_mask": Field("BT", INPUT, "0 on the tokens of a tool's answer, 1 on others", True),
    "mask": Field("BT", RESULT, "1 on trained tokens", whole_numbers=True),
    "row_ids": Field("B", INPUT, "the place of each row before the system shuffled them", whole_numbers=True),
    "group_ids": Field("B", INPUT, "the prompt of each row", whole_numbers=True),
    "micro_batch_ids": Field("B", INPUT, "the micro-batch of each row", whole_numbers=True),
    "rewards": Field("B", INPUT, "one reward per row, before the KL"),
    "divisor": Field("", INPUT, "the number of tokens that divides the loss, as the system counted it"),
    "rows": Field("R", INPUT, "the rows whose logits or hidden states are recorded: one or two suffice", True),
    "columns": Field("N", INPUT, "the positions whose logits or hidden states are recorded; all T if absent", True),
    "logits": Field("RNV", INPUT, "logits of the policy as its model returns them: position t predicts token t + 1"),
    "hidden": Field("RND", INPUT, "final hidden states of the policy, in place of logits"),
    "head": Field("DV", INPUT, "LM head of the policy, for hidden"),
    "ref_logits": Field("RNV", INPUT, "logits of the reference"),
    "ref_hidden": Field("RND", INPUT, "final hidden states of the reference"),
    "ref_head": Field("DV", INPUT, "LM head of the reference; head if absent"),
    "log_probs": Field("BT", RESULT, "log-probs of the policy that is trained"),
    "ref_log_probs": Field("BT", RESULT, "log-probs of the reference"),
    "old_log_probs": Field("BT", INPUT, "log-probs of the policy at the start of the update; log_probs if absent"),
    "rollout_log_probs": Field("BT", INPUT, "log-probs of the sampler"),
    "first_log_probs": Field("BT", INPUT, "log_probs of the first update of the batch, which judge old and sampler"),
    "routed_experts": Field("BTLK", INPUT, "experts of each token in the sampler; -1: unknown, or padding", True),
    "used_experts": Field("BTLK", RESULT, "experts of each token in the trainer; -1: unknown", True),
    "router_entropy": Field("BTL", INPUT, "entropy of the trainer's routers in nats, for a note by layer"),
    "lag": Field("B", INPUT, "RL steps since a row was sampled, for a note of other experts by lag", True),
    "values": Field("BT", INPUT, "the value function before each token, for GAE"),
    "entropy": Field("BT", INPUT, "entropy of the policy at each token, for a bonus or a quantile"),
    "ratio": Field("BT", RESULT, "importance ratio of policy and old policy, before any clip"),
    "weights": Field("BT", RESULT, "weights or mask of the rollout correction"),
    "kl": Field("BT", RESULT, "KL estimate per token, without its coefficient"),
    "advantages": Field("BT", RESULT, "advantages, per row or per token, before a KL in the advantage", per_row=True),
    "token_loss": Field("BT", RESULT, "policy loss per token with the correction's weights, without the KL term"),
    "loss": Field("", RESULT, "the loss that is differentiated, KL term included"),
    "grad_log_probs": Field("BT", RESULT, "derivative of loss by log_probs"),
}
SECTIONS = (
    *("mask", "log_probs", "reference", "kl", "correction", "advantage", "loss", "entropy", "reduction"),
    "gradient",
)
KEYS = ("system", "release", "dtype", "note", "recorded_by", "eos_id", "pad_id", "group_size")
HEADER = ("kljax_parity", *KEYS, *SECTIONS)

MAX_HEADER = 100_000_000
# Results that later stages take as they are.
INPUT_TOO = ("log_probs", "ref_log_probs")
# A compressed member cannot be read in parts.
MAX_COMPRESSED = 1 << 28
SAFETENSORS_DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1"},
}


class DumpError(ValueError):
    """A file that is no dump, or a field of it that is not as the schema has it."""


def field_of(name: str) -> Field:
    """Returns the field of a name; a metric is a scalar result."""
    return Field("", RESULT, "a logged number") if name.startswith(METRIC) else FIELDS[name]


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in a file: where it lies, or the array itself if the file compresses it."""

    shape: tuple[int, ...]
    dtype: str
    path: pathlib.Path
    offset: int = 0
    order: Any = "C"
    bfloat16: bool = False
    loaded: np.ndarray | None = None

    def part(self, *index: Any) -> np.ndarray:
        """Reads `array[index]` in the dtype of the file, bfloat16 as float32; only the pages of the part are loaded."""
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
        """Reads an array, or some of its rows: booleans for the mask, int64 for whole numbers, else float64."""
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
        """Checks names, shapes and dtypes, and returns the size of each axis."""
        sizes: dict[str, int] = {}
        sources: dict[str, str] = {}
        for name, array in self._stored.items():
            if name not in FIELDS and not name.startswith(METRIC):
                known = (*FIELDS, f"{METRIC}NAME")
                raise DumpError(f"{name}: no such field; expected {', '.join(known)}{closest(name, FIELDS)}")
            if not name.isprintable():
                raise DumpError(f"{name!r}: got characters that cannot be printed, expected a printable name")
            field = field_of(name)
            axes = field.axes if "columns" in self._stored else field.axes.replace("N", "T")
            axes = "B" if field.per_row and len(array.shape) == 1 else axes
            got = f"{name}: got shape {list(array.shape)}"
            wanted = f"[{', '.join(axes)}]"
            if len(array.shape) != len(axes):
                raise DumpError(f"{got}, expected {wanted}")
            for axis, size in zip(axes, array.shape, strict=True):
                if size < 1:
                    raise DumpError(f"{got}, expected at least 1 along each axis")
                if sizes.setdefault(axis, size) != size:
                    raise DumpError(f"{got}, expected {wanted}; {axis} is {sizes[axis]} in {sources[axis]}")
                sources.setdefault(axis, name)
            kind = "f" if array.bfloat16 else np.dtype(array.dtype).kind
            integers = field.whole_numbers and name != "mask"
            if kind not in ("iub" if integers else "fiub"):
                raise DumpError(f"{name}: got dtype {array.kind}, expected {'integers' if integers else 'numbers'}")
        for name in ("log_probs", "mask"):
            if name not in self._stored:
                raise DumpError(f"{name}: missing; a dump needs log_probs and mask")
        return sizes

    def _check_contents(self) -> None:
        for name in {"mask", "tool_mask"} & set(self):
            values = self.stored(name).part(...)
            _refuse(name, values, (values != 0) & (values != 1), "0 or 1")
        for name, limit in (("rows", self.sizes["B"]), ("columns", self.sizes["T"])):
            if name in self and not ((numbers := self.read(name)) >= 0).all() & (numbers < limit).all():
                raise DumpError(f"{name}: got {numbers.tolist()}, expected {name} from 0 to {limit - 1}")
        for side in ("", "ref_"):
            if f"{side}hidden" in self and "head" not in self and f"{side}head" not in self:
                raise DumpError(f"{side}hidden: needs {side}head, the LM head; record it beside the hidden states")
            if (f"{side}hidden" in self or f"{side}logits" in self) and not ("rows" in self and "tokens" in self):
                raise DumpError(f"{side}logits: logits and hidden states need rows and tokens; record both")
        trained = self.read("mask")
        limits = {"tokens": self.sizes.get("V", 1 << 62) - 1}
        limits |= dict.fromkeys(("prompt_lengths", "lengths"), self.sizes["T"])
        for name in self:
            field = field_of(name)
            values = self.stored(name).part(...) if field.axes in ("BT", "B") or name == "divisor" else np.zeros(0)
            used: Any = {2: trained, 1: trained.any(-1), 0: True}[values.ndim]
            if name in limits:
                _refuse(name, values, used & ((values < 0) | (values > limits[name])), f"0 to {limits[name]}")
            elif values.size and not field.whole_numbers:
                # A result may be infinite where the system's is.
                wrong = np.isnan(values) if field.kind == RESULT and name not in INPUT_TOO else ~np.isfinite(values)
                _refuse(name, values, used & wrong, "a finite number")


def _refuse(name: str, values: np.ndarray, wrong: np.ndarray, expected: str) -> None:
    """Refuses an array with a wrong number, naming the first."""
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        place = "".join([f" at (row, token) {where}"] if len(where) == 2 else [f" at row {row}" for row in where])
        raise DumpError(f"{name}: got {values[where]}{place}, expected {expected}")


def open_dump(path: str | pathlib.Path) -> Dump:
    """Opens an `.npz` or safetensors file, told by its first bytes; arrays stay in it unless it compresses them.

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
                return Stored(shape, dtype.str, path, loaded=values)
    except DumpError:
        raise
    except BROKEN as error:
        raise DumpError(f"{name}: is not a NumPy array: {error}") from error
    return Stored(shape, dtype.str, path, _data_offset(path, info) + begin, "F" if fortran else "C")


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
    return Stored(shape, dtype.str, path, start + begin, bfloat16=kind == "BF16")


def _parse_header(text: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"header: is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise DumpError(f"header: got {type(header).__name__}, expected a JSON object")
    return header
