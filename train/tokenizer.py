"""A byte-level tokenizer: every string has an encoding, nothing has to be downloaded."""

from collections.abc import Iterable
from dataclasses import dataclass

BYTES = 256
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then three special ids.

    `vocab_size` is rounded up to a multiple of 8, so that a `tensor` mesh axis of up to 8 divides it; the ids
    between `pad_id` and `vocab_size` are never produced by `encode`.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("1+2=")
        [49, 43, 50, 61]
        >>> tokenizer.decode([51, tokenizer.eos_id])
        '3'
    """

    bos_id: int = BYTES
    eos_id: int = BYTES + 1
    pad_id: int = BYTES + 2
    vocab_size: int = BYTES + 8

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`; no special ids are added. A lone surrogate becomes "?"."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, EOS left out.

        Bytes that are not UTF-8 and every other special id become U+FFFD: a sampled BOS inside a number must not vanish
        from what the verifier reads.
        """
        pieces: list[str] = []
        run = bytearray()
        for token in ids:
            if 0 <= token < BYTES:
                run.append(token)
            elif token != self.eos_id:
                pieces += [run.decode("utf-8", errors="replace"), UNKNOWN]
                run.clear()
        return "".join(pieces) + run.decode("utf-8", errors="replace")
