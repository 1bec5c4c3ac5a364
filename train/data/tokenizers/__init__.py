"""Tokenizers: bytes by default, and that of a Hugging Face folder with its chat template."""

from typing import TYPE_CHECKING

from train.data.tokenizers.byte import ByteTokenizer
from train.data.tokenizers.protocol import UNKNOWN, Tokenizer

if TYPE_CHECKING:
    from train.config.schema import Config

__all__ = ["UNKNOWN", "ByteTokenizer", "Tokenizer", "load_tokenizer", "vocabulary_bytes"]


def load_tokenizer(config: "Config") -> Tokenizer:
    """The tokenizer of `model.path` with the chat template as `data` says, or bytes for a model without a folder.

    Raises:
      UserError: the folder has no usable tokenizer, or not the template that `data` asks for.
    """
    path = config.model.path
    if path is None:
        return ByteTokenizer()
    from train.data.tokenizers.files import load_folder  # only here is the library needed

    data = config.data
    return load_folder(
        path, chat=data.chat, system=data.system, template=data.chat_template, arguments=data.template_arguments
    )


def vocabulary_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """`token_bytes` for a model whose vocabulary has `size` rows: those beyond the tokenizer show as U+FFFD.

    Example:
      >>> vocabulary_bytes(ByteTokenizer(), 300)[-1].decode() == UNKNOWN
      True
    """
    known = tokenizer.token_bytes()
    return known + [UNKNOWN.encode()] * (size - len(known))
