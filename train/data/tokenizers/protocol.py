"""What the trainer asks of a tokenizer."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from train.data.tasks.task import Example

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
      bos_id: what a sequence begins with, or None.
      eos_ids: what ends a completion, the usual one first; at least one.
      pad_id: fills rows; masks come from lengths, so it may be an id that is also drawn.
      vocab_size: ids are below it.
    """

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone; nothing is put before or after."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without what ends it; every other id shows, one without a text as U+FFFD."""

    def prompt_ids(self, example: "Example") -> list[int]:
        """What the model is shown: the chat template of the model, or BOS (where the model has one) and the prompt."""

    def solution_ids(self, example: "Example") -> list[int]:
        """What imitation continues `prompt_ids` with, its end included."""

    def token_bytes(self) -> list[bytes]:
        """What each id adds to a text, `vocab_size` entries; nothing for what ends it."""
