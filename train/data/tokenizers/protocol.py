"""The protocol of tokenizers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from train.data.tasks.task import Example

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation as a chat template gets it: `role` and `content`, and `tool_calls` of some replies."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """Conversion between text and ids.

    A completion is encoded and decoded by `train.data.tokenizers.encode_continuation` and `decode_continuation`, which
    call `encode`, `decode` and `decode_all` with tokens of its prompt before it. So these may treat the beginning of a
    text as they like, such as put a space before it or leave one out, if what they return for the tokens inside a text
    is right. `encode` is called for texts that `decode_all` returned.

    Attributes:
      bos_id: id of BOS, or None.
      eos_ids: ids that end a completion, the default first; at least one.
      pad_id: padding id; masks come from lengths, so it may also be sampled.
      vocab_size: upper bound of the ids.
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
        """Encodes a text from its beginning, without BOS or EOS."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes a text from its beginning, without EOS ids; an id without a text becomes U+FFFD."""

    def decode_all(self, ids: Iterable[int]) -> str:
        """Decodes `ids` with the text of every special token, EOS included: the text as the model sees it."""

    def prompt_ids(self, example: "Example") -> list[int]:
        """Encodes the prompt with the chat template, or as BOS (if there is one) and the prompt."""

    def solution_ids(self, example: "Example") -> list[int]:
        """Encodes the solution as the continuation of `prompt_ids`, by `encode_continuation`, and EOS."""

    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of each of `vocab_size` ids; empty for EOS ids."""


class EpisodeTokenizer(Tokenizer, Protocol):
    """A tokenizer that also writes the turns of episodes.

    Attributes:
      tools: JSON schemas that prompts tell, if a chat template writes them; None for none.
    """

    @property
    def tools(self) -> Any: ...

    @property
    def has_template(self) -> bool:
        """Whether conversations are written by a chat template."""
        ...

    def messages(self, example: "Example") -> list[dict[str, Any]]:
        """Returns the messages of a prompt."""
        ...

    def conversation_ids(self, messages: Messages, tools: Any = None) -> list[int]:
        """Encodes messages up to the next reply; what a message says becomes no control token, unless a reply does."""

    def observation_ids(
        self, messages: Messages, observations: Messages, *, before: Sequence[int], tools: Any = None
    ) -> list[int]:
        """Encodes what follows a sampled reply up to the next one: messages, whose contents are encoded as text."""
