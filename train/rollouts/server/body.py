"""The body of a response: bounded in bytes, also after decompression."""

import contextlib
import zlib
from collections.abc import AsyncGenerator
from typing import cast

import httpx

ENCODINGS = ("identity", "gzip")
"""Content encodings that are accepted; a request names them."""


class TooLongError(Exception):
    """Raised for a body of more bytes than allowed."""


class BrokenBodyError(Exception):
    """Raised for a body that cannot be decompressed."""


async def read_body(response: httpx.Response, limit: int) -> bytes:
    """Reads the body of a streamed response.

    Args:
      response: the response, whose body has not been read.
      limit: largest number of bytes, of the compressed and of the decompressed body.

    Raises:
      TooLongError: the body has more bytes; no more than `limit` of them were decompressed.
      BrokenBodyError: its encoding is unknown, or the compressed data is damaged.
    """
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ENCODINGS:
        raise BrokenBodyError(f"the content encoding {encoding[:40]!r}, expected {' or '.join(ENCODINGS)}")
    unzip = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS) if encoding == "gzip" else None
    body = bytearray()
    received = 0
    # Declared as an iterator, it is a generator, which has to be closed if the body is not read to its end.
    generator = cast("AsyncGenerator[bytes, None]", response.aiter_raw())
    async with contextlib.aclosing(generator) as chunks:
        async for chunk in chunks:
            received += len(chunk)
            # One byte over the limit is enough to know.
            body += chunk if unzip is None else _decompress(unzip, chunk, limit + 1 - len(body))
            if max(received, len(body)) > limit:
                raise TooLongError
    if unzip is not None and not unzip.eof:
        raise BrokenBodyError("gzip that ends too early")
    return bytes(body)


def _decompress(unzip: "zlib._Decompress", chunk: bytes, most: int) -> bytes:
    try:
        part = unzip.decompress(chunk, most)
    except zlib.error as error:
        raise BrokenBodyError(f"damaged gzip: {error}") from None
    if unzip.unused_data:
        raise BrokenBodyError("bytes after the end of the compressed data")
    return part
