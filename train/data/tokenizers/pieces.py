"""The bytes of each token, from the decoder in `tokenizer.json`."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Maps the printable characters of byte-level BPE (GPT-2) to their bytes.

    Example:
        >>> byte_alphabet()["Ġ"], byte_alphabet()["a"]
        (32, 97)
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _decoders(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _decoders(inner)
    else:
        yield decoder


def _byte_level(piece: str, alphabet: Mapping[str, int]) -> bytes:
    return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece)


def _sentence_piece(piece: str, space: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(space, " ").encode()


def piece_bytes(decoder: Mapping[str, Any] | None, pieces: Mapping[int, str]) -> dict[int, bytes]:
    """Computes the bytes of each piece of the vocabulary, without the added tokens.

    Args:
      decoder: the `decoder` of `tokenizer.json`: byte-level, or metaspace with or without byte fallback.
      pieces: id -> piece, as written in the vocabulary.

    Raises:
      ValueError: the decoder is of another kind.
    """
    kinds = list(_decoders(decoder))
    names = [kind["type"] for kind in kinds]
    if "ByteLevel" in names:
        alphabet = byte_alphabet()
        return {number: _byte_level(piece, alphabet) for number, piece in pieces.items()}
    if set(names) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and names:
        spaces = [kind.get("replacement") or kind["pattern"]["String"] for kind in kinds if kind["type"] == "Metaspace"]
        spaces += [kind["pattern"]["String"] for kind in kinds if kind["type"] == "Replace" and kind["content"] == " "]
        space = spaces[0] if spaces else "\u2581"
        return {number: _sentence_piece(piece, space) for number, piece in pieces.items()}
    got = ", ".join(names) or "none"
    raise ValueError(
        f"decoder of tokenizer.json: got {got}, expected ByteLevel, or Metaspace/Replace with ByteFallback"
    )
