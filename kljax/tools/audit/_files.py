"""Reads the arrays of an audit from NumPy files that anybody may have written, without pickle."""

import math
import zipfile
from collections.abc import Mapping, Sequence

import numpy as np

from kljax._npy import BROKEN, read_header

# A compressed array is read into memory: a file of some kilobytes may stand for gigabytes.
MAX_COMPRESSED = 1 << 30
ENCRYPTED = 0x1


class InputError(Exception):
    """A mistake in the arguments or files of the user."""


def read_array(option: str, path: str, *, kinds: str = "fiub") -> np.ndarray:
    """Maps the array of an `.npy` file into memory.

    Args:
      option: name of the option in messages.
      path: an `.npy` file.
      kinds: the kinds of dtype that are allowed, as `dtype.kind`.

    Raises:
      InputError: there is no such file, it is no array, or its dtype is of none of the kinds.
    """
    if _is_zip(option, path):
        raise InputError(f"{option}: {path} holds several arrays, expected an .npy file with one")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except BROKEN as error:
        raise InputError(f"{option}: {path} cannot be read as a NumPy file: {error}") from error
    _check_dtype(f"{option}: {path}", array.dtype, kinds)
    return array


def read_batch(option: str, path: str, *, needed: Sequence[str], others: Sequence[str]) -> Mapping[str, np.ndarray]:
    """Reads arrays of numbers by name from an `.npz` file; arrays of `others` only if they exist.

    Args:
      path: an `.npz` file.

    Raises:
      InputError: there is no such file, it is no archive, or an array is missing, damaged, too large or no numbers.
    """
    if not _is_zip(option, path):
        raise InputError(f"{option}: {path} is no archive of arrays, expected an .npz file")
    try:
        archive = zipfile.ZipFile(path)
    except BROKEN as error:
        raise InputError(f"{option}: {path} cannot be read as a NumPy file: {error}") from error
    with archive:
        names = [info.filename.removesuffix(".npy") for info in archive.infolist()]
        missing = [name for name in needed if name not in names]
        if missing:
            listed = ", ".join(names) or "nothing"
            raise InputError(f"{option}: {path} has no {' and no '.join(missing)}; it has {listed}")
        wanted = [name for name in (*needed, *others) if name in names]
        return {name: _member(f"{option}: {path}: {name}", archive, name) for name in wanted}


def _is_zip(option: str, path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"PK"
    except FileNotFoundError as error:
        raise InputError(f"{option}: there is no file {path}") from error
    except OSError as error:
        raise InputError(f"{option}: {path} cannot be read: {error.strerror}") from error


def _member(where: str, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Reads one array, after its header is compared with the size of the member."""
    matches = [info for info in archive.infolist() if info.filename in (name, f"{name}.npy")]
    if len(matches) != 1:
        raise InputError(f"{where}: the file holds it {len(matches)} times")
    info = matches[0]
    if info.flag_bits & ENCRYPTED:
        raise InputError(f"{where}: is encrypted; store it with numpy.savez")
    if info.compress_type != zipfile.ZIP_STORED and info.file_size > MAX_COMPRESSED:
        raise InputError(
            f"{where}: {info.file_size:,} bytes are compressed, expected at most {MAX_COMPRESSED:,}; store it with "
            "numpy.savez, uncompressed"
        )
    try:
        with archive.open(info) as member:
            shape, fortran, dtype = read_header(member)
            size = info.file_size - member.tell()
            _check_dtype(where, dtype, "fiub")
            if math.prod(shape) * dtype.itemsize != size:
                raise InputError(f"{where}: {size:,} bytes for shape {list(shape)} of {dtype}")
            values = np.frombuffer(member.read(), dtype)
    except BROKEN as error:
        raise InputError(f"{where}: cannot be read as an array: {error}") from error
    return values.reshape(shape, order="F" if fortran else "C")


def _check_dtype(where: str, dtype: np.dtype, kinds: str) -> None:
    if dtype.kind not in kinds:
        expected = "integers" if kinds == "iu" else "numbers (bfloat16 goes as float32)"
        raise InputError(f"{where} has dtype {dtype}, expected {expected}")
