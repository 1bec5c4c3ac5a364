"""Tokenizers: bytes by default, or the tokenizer and chat template of a Hugging Face folder."""

from typing import TYPE_CHECKING

from train.data.tokenizers.byte import ByteTokenizer
from train.data.tokenizers.protocol import UNKNOWN, Tokenizer

if TYPE_CHECKING:
    from train.config.schema import Config

__all__ = ["UNKNOWN", "ByteTokenizer", "Tokenizer", "load_tokenizer", "vocabulary_bytes"]


def load_tokenizer(config: "Config") -> Tokenizer:
    """Loads the tokenizer of `model.path` with the chat settings of `data`; bytes if there is no folder.

    Raises:
      UserError: the folder has no usable tokenizer, or lacks the chat template that `data` requires.
    """
    path = config.model.path
    if path is None:
        return ByteTokenizer()
    from train.data.tokenizers.files import load_folder  # the library is needed only here

    data = config.data
    return load_folder(
        path, chat=data.chat, system=data.system, template=data.chat_template, arguments=data.template_arguments
    )


def vocabulary_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Returns `token_bytes` for a model vocabulary of `size` rows; rows without a token decode to U+FFFD.

    Example:
        >>> vocabulary_bytes(ByteTokenizer(), 300)[-1].decode() == UNKNOWN
        True
    """
    known = tokenizer.token_bytes()
    return known + [UNKNOWN.encode()] * (size - len(known))
