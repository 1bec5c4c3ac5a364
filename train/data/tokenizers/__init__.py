"""Tokenizers: bytes by default, or the tokenizer and chat template of a Hugging Face folder."""

from typing import TYPE_CHECKING

from train.config.errors import UserError
from train.config.user_functions import make_with
from train.data.tokenizers.byte import ByteTokenizer
from train.data.tokenizers.continuation import decode_continuation, encode_continuation
from train.data.tokenizers.protocol import UNKNOWN, Tokenizer

if TYPE_CHECKING:
    from train.config.schema import Config

__all__ = [
    "FOLDER_FILES",
    "UNKNOWN",
    "ByteTokenizer",
    "Tokenizer",
    "decode_continuation",
    "encode_continuation",
    "load_tokenizer",
    "vocabulary_bytes",
]

FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a Hugging Face folder that its tokenizer and chat template are read from."""


def load_tokenizer(config: "Config") -> Tokenizer:
    """Loads `data.tokenizer`, or the tokenizer of `model.path` with the chat settings of `data`, or else bytes.

    Raises:
      UserError: the function of the user fails, or the folder has no usable tokenizer, or lacks the chat template that
        `data` requires.
    """
    path = config.model.path
    data = config.data
    if data.tokenizer is not None:
        made: Tokenizer = make_with("data.tokenizer", data.tokenizer, Tokenizer, **data.tokenizer_arguments)
        _check_ids(data.tokenizer, made)
        return made
    if path is None:
        return ByteTokenizer()
    from train.data.tokenizers.files import load_folder  # the library is needed only here

    return load_folder(
        path, chat=data.chat, system=data.system, template=data.chat_template, arguments=data.template_arguments
    )


def _check_ids(name: str, tokenizer: Tokenizer) -> None:
    """Raises `UserError` unless the special ids of a tokenizer of the user are in its vocabulary."""
    special = {"bos_id": (tokenizer.bos_id,), "eos_ids": tokenizer.eos_ids or (-1,), "pad_id": (tokenizer.pad_id,)}
    for field, ids in special.items():
        wrong = [number for number in ids if number is not None and not 0 <= number < tokenizer.vocab_size]
        if wrong:
            got = getattr(tokenizer, field)
            raise UserError(
                f"data.tokenizer: {name}: {field}: got {got}, expected ids below vocab_size = {tokenizer.vocab_size}"
            )


def vocabulary_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Returns `token_bytes` for a model vocabulary of `size` rows; rows without a token decode to U+FFFD.

    Example:
        >>> vocabulary_bytes(ByteTokenizer(), 300)[-1].decode() == UNKNOWN
        True
    """
    known = tokenizer.token_bytes()
    return known + [UNKNOWN.encode()] * (size - len(known))
