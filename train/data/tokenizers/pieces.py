"""The bytes of each token, from the decoder in `tokenizer.json`."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

SENTENCE_PIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
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


def is_byte(piece: str) -> bool:
    """Whether a piece stands for a byte: `<0x0A>`."""
    return _BYTE.fullmatch(piece) is not None


def steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yields the steps of a normalizer or decoder of `tokenizer.json`, in order."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for inner in part.get("decoders", part.get("normalizers", ())):
            yield from steps(inner)
    else:
        yield part


def _byte_level(piece: str, alphabet: Mapping[str, int]) -> bytes:
    return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else piece.encode()


def piece_bytes(decoder: Mapping[str, Any] | None, pieces: Mapping[int, str]) -> dict[int, bytes]:
    """Computes the bytes that each piece of the vocabulary adds to a text.

    Args:
      decoder: the `decoder` of `tokenizer.json`: byte-level, or metaspace with or without byte fallback.
      pieces: id -> piece, as written in the vocabulary.

    Raises:
      ValueError: the decoder is of another kind.
    """
    kinds = list(steps(decoder))
    names = [kind["type"] for kind in kinds]
    if "ByteLevel" in names:
        alphabet = byte_alphabet()
        return {number: _byte_level(piece, alphabet) for number, piece in pieces.items()}
    replaced = [_replaced(kind) for kind in kinds if kind["type"] in ("Replace", "Metaspace")]
    if not names or not set(names) <= SENTENCE_PIECE or None in replaced:
        got = ", ".join(names) or "none"
        raise ValueError(
            f"decoder of tokenizer.json: got {got}, expected ByteLevel, or Metaspace/Replace with ByteFallback"
        )
    texts = dict(pieces)
    for old, new in filter(None, replaced):
        texts = {number: text.replace(old, new) for number, text in texts.items()}
    return {
        number: bytes([int(byte[1], 16)])
        if (byte := _BYTE.fullmatch(text)) and "ByteFallback" in names
        else text.encode()
        for number, text in texts.items()
    }


def _replaced(kind: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the text that a decoder replaces in each piece, and the new one; None for a regular expression."""
    if kind["type"] == "Metaspace":
        return kind["replacement"], " "
    return (kind["pattern"]["String"], kind["content"]) if "String" in kind["pattern"] else None
