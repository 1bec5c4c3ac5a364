"""A byte-level tokenizer, which encodes every string without a download."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.config.model import BYTE_VOCABULARY
from train.data.tokenizers.calls import plain_text
from train.data.tokenizers.pieces import byte_alphabet
from train.data.tokenizers.protocol import UNKNOWN, Messages

if TYPE_CHECKING:
    from train.data.tasks.task import Example

BYTES = 256


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
    vocab_size: int = BYTE_VOCABULARY

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The EOS id, as a tuple."""
        return (self.eos_id,)

    def encode(self, text: str) -> list[int]:
        """Encodes `text` as UTF-8 bytes without special ids. A lone surrogate becomes "?"."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes `ids` without EOS.

        Invalid UTF-8 and every other special id become U+FFFD: a sampled BOS inside a number must stay visible to the
        verifier.
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

    def decode_all(self, ids: Iterable[int]) -> str:
        """Decodes `ids` with a name for each special id, such as `<bos>`."""
        names = {self.bos_id: b"<bos>", self.eos_id: b"<eos>", self.pad_id: b"<pad>"}
        pieces = (bytes([token]) if 0 <= token < BYTES else names.get(token, UNKNOWN.encode()) for token in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def prompt_ids(self, example: "Example") -> list[int]:
        """Returns BOS and the bytes of the prompt, so that even an empty prompt has a token."""
        return [self.bos_id, *self.encode(example.prompt)]

    def solution_ids(self, example: "Example") -> list[int]:
        """Returns the bytes of the solution and EOS."""
        return [*self.encode(example.solution), self.eos_id]

    @property
    def tools(self) -> None:
        """None: prompts tell no tools."""
        return

    @property
    def has_template(self) -> bool:
        """False: there is no chat template."""
        return False

    def messages(self, example: "Example") -> list[dict[str, Any]]:
        """Returns the messages of a prompt."""
        return [{"role": role, "content": text} for role, text in example.conversation()]

    def conversation_ids(self, messages: Messages, tools: Any = None) -> list[int]:
        """Returns BOS and the bytes of the messages, with EOS after each reply; the tools are not told."""
        ids = [self.bos_id]
        for message in messages:
            ids += self.encode(plain_text(message))
            if message["role"] == "assistant":
                ids.append(self.eos_id)
        return ids

    def observation_ids(
        self, messages: Messages, observations: Messages, *, before: Sequence[int], tools: Any = None
    ) -> list[int]:
        """Returns the bytes of observations."""
        return self.conversation_ids(observations)[1:]

    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of each id; BOS, padding and later ids are U+FFFD, as in `decode`."""
        special = [UNKNOWN.encode()] * (self.vocab_size - BYTES)
        special[self.eos_id - BYTES] = b""
        return [bytes([byte]) for byte in range(BYTES)] + special

    def files(self) -> dict[str, str]:
        """Returns the files of a tokenizer for transformers with the same ids: one token for each byte, BOS first.

        The texts `<bos>`, `<eos>` and `<pad>` inside a text are the tokens there; here they are bytes.
        """
        special = {"<bos>": self.bos_id, "<eos>": self.eos_id, "<pad>": self.pad_id}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        tokenizer = {
            "version": "1.0",
            "added_tokens": [{"id": number, "content": text, **flags} for text, number in special.items()],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [bos, first],
                "pair": [bos, first, second],
                "special_tokens": {"<bos>": {"id": "<bos>", "ids": [self.bos_id], "tokens": ["<bos>"]}},
            },
            "decoder": level,
            "model": {"type": "BPE", "vocab": byte_alphabet(), "merges": []},
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{text[1:-1]}_token": text for text in special},
            "clean_up_tokenization_spaces": False,
        }
        return {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
