"""The header of an array in NumPy's format, and the errors of files that hold none."""

import struct
import tokenize
import zipfile
import zlib
from typing import IO

import numpy as np

# All that zipfile, zlib, struct and numpy raise for bytes that are no archive, no member or no header.
BROKEN = (
    *(OSError, ValueError, EOFError, RuntimeError, NotImplementedError, OverflowError, MemoryError, IndexError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Reads the header of an `.npy` file, and leaves the file at the first byte of the array.

    Returns:
      Shape, whether the array is stored in Fortran order, and dtype.

    Raises:
      ValueError: the bytes are no such header.
    """
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(file)
    except (SyntaxError, tokenize.TokenError, RecursionError, MemoryError, TypeError) as error:
        # NumPy parses the header as Python, and lets through what the parser raises.
        raise ValueError(f"its header cannot be parsed ({type(error).__name__})") from error
    return shape, fortran, dtype
