"""The `Tokenizer` protocol for a tokenizer of the `tokenizers` library."""

import copy
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tokenizers

from train.config.errors import UserError, warn
from train.data.tokenizers.calls import plain_text
from train.data.tokenizers.chat import ChatTemplate
from train.data.tokenizers.continuation import decode_after, encode_continuation
from train.data.tokenizers.pieces import is_byte, piece_bytes
from train.data.tokenizers.protocol import UNKNOWN, Messages

if TYPE_CHECKING:
    from train.data.tasks.task import Example

REPLY = "\u2402reply\u2402"
"""Stands for a reply while a template is rendered."""
CONTENT = "\u2402content {}\u2402"
"""Stands for the content of a message, by its number, while a template is rendered."""


class FolderTokenizer:
    """A `tokenizer.json` with an optional chat template; attributes as in `train.data.tokenizers.Tokenizer`.

    Without a chat template, a prompt begins with the prefix of the post-processor: BOS or nothing. A chat template
    writes every special token itself, and nothing is added.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str],
        eos_ids: Iterable[int],
        add_bos: bool | None = None,
        template: ChatTemplate | None = None,
        system: str | None = None,
    ) -> None:
        """Wraps a tokenizer.

        Args:
          tokenizer: tokenizer to wrap; its padding and truncation are switched off.
          special: text of each special token by its role (`bos_token`, ...).
          eos_ids: ids that end a completion, at least one.
          add_bos: whether a prompt without a template begins with BOS; None means as the post-processor does.
          template: chat template; None means that prompts are plain text.
          system: text of the system message.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._template = template
        self._system = system
        self.tools: Any = None
        vocabulary = {number: piece for piece, number in tokenizer.get_vocab(with_added_tokens=True).items()}
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._pieces = {number: piece for number, piece in vocabulary.items() if number not in self._added}
        self._spaces: dict[int | None, bool] = {}
        self._spelled: set[str] = set()
        self._warned = False
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.vocab_size = max(*vocabulary, *self.eos_ids) + 1
        self.bos_id = self._id(special.get("bos_token"))
        pad = self._id(special.get("pad_token"))
        self.pad_id = self.eos_ids[0] if pad is None else pad
        self._first = self._first_ids(add_bos)

    def with_tools(self, tools: Any) -> "FolderTokenizer":
        """Returns a tokenizer whose prompts tell tools, JSON schemas, where the chat template writes them."""
        changed = copy.copy(self)
        changed.tools = tools
        return changed

    def _id(self, text: str | None) -> int | None:
        return None if text is None else self._tokenizer.token_to_id(text)

    def _first_ids(self, add_bos: bool | None) -> list[int]:
        """Finds the special ids before the text of a prompt without a template."""
        processed = self._tokenizer.encode("a").ids
        plain = self._encode("a")
        starts = (i for i in range(len(processed) + 1) if processed[i : i + len(plain)] == plain)
        start = next(starts, None)
        if start is None:
            raise UserError("model.path: the post-processor of tokenizer.json changes the tokens of a text")
        first = processed[:start]
        if add_bos and self.bos_id is not None and self.bos_id not in first:
            return [self.bos_id, *first]
        return [token for token in first if add_bos is not False or token != self.bos_id]

    def encode(self, text: str) -> list[int]:
        """Encodes `text` alone; texts of special tokens become their ids, a lone surrogate becomes "?".

        Raises:
          UserError: the vocabulary cannot spell the text, and would leave characters out.
        """
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        ids = self._encode(clean)
        unsure = {*clean} - self._spelled
        self._spelled |= {letter for letter in unsure if not self._lost(letter, self._encode(letter))}
        if not unsure <= self._spelled and (lost := self._lost(clean, ids)):
            self._report_lost(lost, clean, ids)
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _lost(self, text: str, ids: list[int]) -> list[str]:
        """Lists the characters of a text that its tokens do not spell, in any form that a normalizer gives them."""
        normalizer = self._tokenizer.normalizer
        decoded = self.decode_all(ids)
        spelled = {*decoded.casefold(), *unicodedata.normalize("NFKD", decoded).casefold()}

        def is_lost(letter: str) -> bool:
            normal = letter if normalizer is None else normalizer.normalize_str(letter)
            forms = {*letter.casefold(), *unicodedata.normalize("NFKD", letter).casefold(), *normal.casefold()}
            return not (letter.isspace() or not normal.strip(" \u2581") or forms & spelled)

        return [letter for letter in dict.fromkeys(text) if is_lost(letter)]

    @cached_property
    def _unknown_id(self) -> int | None:
        """The id of characters without a token; None if they are left out."""
        model = self._tokenizer.model
        name = getattr(model, "unk_token", None)
        return json.loads(model.__getstate__()).get("unk_id") if name is None else self._id(name)  # of Unigram

    def _report_lost(self, lost: list[str], text: str, ids: list[int]) -> None:
        """Raises for characters that are left out; warns, once, of such that become the unknown token."""
        shown = ", ".join(repr(letter) for letter in lost[:5])
        if self._unknown_id not in ids:
            raise UserError(
                f"model.path: the tokenizer cannot spell {shown} of the text {text[:80]!r}, and would leave it out; "
                "use the vocabulary that the model was trained with, or another text"
            )
        if not self._warned:
            self._warned = True
            warn(f"model.path: the tokenizer has no token for {shown} of the text {text[:80]!r}; the model reads <unk>")

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes `ids` without EOS ids.

        Other special tokens keep their text, and ids without a token become U+FFFD: every sampled token must stay
        visible to the verifier.
        """
        return self.decode_all(token for token in ids if token not in self.eos_ids)

    def decode_all(self, ids: Iterable[int]) -> str:
        """Decodes `ids` with the text of every special token; ids without a token become U+FFFD.

        The inverse of `encode`: a space that it puts at the beginning, or behind a special token, is left out.
        """
        texts: list[str] = []
        added_space = self._adds_space(None)
        for is_piece, group in itertools.groupby(ids, self._pieces.__contains__):
            run = list(group)
            if is_piece:
                text = self._decode_pieces(run)
                texts.append(text.removeprefix(" ") if added_space else text)
            else:
                texts += [self._added_texts.get(token, UNKNOWN) for token in run]
                added_space = run[-1] in self._added and self._adds_space(run[-1])
        return "".join(texts)

    def _decode_pieces(self, ids: list[int]) -> str:
        """Decodes pieces as they stand inside a text.

        The decoders of the library change the first token, and lose all characters of a run of bytes that ends within
        one.
        """
        if self._piece_bytes is not None:
            return b"".join([self._piece_bytes[token] for token in ids]).decode("utf-8", errors="replace")
        return decode_after(self._tokenizer.decode, self._word, ids)

    @cached_property
    def _decoder(self) -> dict[str, Any] | None:
        decoder = self._tokenizer.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    @cached_property
    def _piece_bytes(self) -> dict[int, bytes] | None:
        """The bytes of each piece; None if the decoder is not supported."""
        try:
            return piece_bytes(self._decoder, self._pieces)
        except ValueError:
            return None

    @cached_property
    def _added_texts(self) -> dict[int, str]:
        """The text of each added token; some are written as pieces, with U+2581 for a space."""
        if self._piece_bytes is None:
            return self._added
        decoded = {
            number: text.decode(errors="replace") for number, text in piece_bytes(self._decoder, self._added).items()
        }
        return {number: self._added[number] if UNKNOWN in text else text for number, text in decoded.items()}

    @cached_property
    def _word(self) -> list[int]:
        """The id of a letter, digit or word; nothing if the vocabulary has none."""
        ids = ([number] for number, piece in self._pieces.items() if not is_byte(piece))
        return next((token for token in ids if _is_word(self._tokenizer.decode(token))), [])

    def _adds_space(self, token: int | None) -> bool:
        """Whether `encode` puts a space before a word behind an added token; None: at the beginning of a text."""
        if token not in self._spaces:
            head = [] if token is None else [token]
            word = self._tokenizer.decode(self._word)
            ids = self._encode("".join(self._added[number] for number in head) + word)
            self._spaces[token] = ids[: len(head)] == head and self._decode_pieces(ids[len(head) :]) == f" {word}"
        return self._spaces[token]

    def plain_ids(self, text: str, before: Sequence[int]) -> list[int]:
        """Encodes a text as it goes on after `before`, as text: control tokens' texts in it do not become such tokens.

        Raises:
          UserError: the vocabulary spells a control token in no other way.
        """
        ids = encode_continuation(self, before, text)
        if not self._has_control(ids):
            return ids
        ids = []
        for piece in self._without_controls(text):
            ids += encode_continuation(self, [*before, *ids], piece)
        self._check_without_controls(ids, text)
        return ids

    def _has_control(self, ids: Iterable[int]) -> bool:
        """Whether a token is a control token."""
        return any(token in self._added for token in ids)

    def _without_controls(self, text: str) -> list[str]:
        """Divides a text so that no piece holds the whole text of a control token."""
        return re.split("|".join(f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in self._marks), text)

    def _check_without_controls(self, ids: Iterable[int], text: str) -> None:
        """Raises `UserError` if the tokens of the pieces of a text have a control token."""
        if self._has_control(ids):
            raise UserError(f"model.path: the tokenizer writes a control token for the text {text[:80]!r}")

    @cached_property
    def _marks(self) -> list[str]:
        """The texts of added tokens, which are more than one letter."""
        return [text for text in self._added.values() if len(text) > 1]

    def conversation_ids(self, messages: Messages, tools: Any = None) -> list[int]:
        """Encodes messages up to the next reply; without a template, their texts one after another, EOS after a reply.

        A content with the text of a control token is encoded as text, alone. That of a reply is not: replies have
        control tokens.

        Args:
          messages: the conversation.
          tools: JSON schemas, which the template tells.

        Raises:
          UserError: the template refuses the messages, or changes what it is given.
        """
        if self._template is None:
            return [*self._first, *self._plain_messages(messages, self._first)]
        numbers = [number for number, message in enumerate(messages) if self._has_controls(message)]
        rendered = self._rendered(_marked(messages, numbers), tools)
        return self._encode_around(rendered, messages, numbers, before=[])

    def observation_ids(
        self, messages: Messages, observations: Messages, *, before: Sequence[int], tools: Any = None
    ) -> list[int]:
        """Encodes what follows a sampled reply up to the next one: observations, and what is around them.

        The template renders the conversation with a mark in place of the reply and of each observation: the reply is
        never encoded again, and an observation with the text of a control token is encoded as text, alone.

        Args:
          messages: the conversation before the reply.
          observations: the messages after it.
          before: all ids so far, which end with the reply.
          tools: JSON schemas, as in the prompt.

        Raises:
          UserError: the template refuses the messages, or changes what it is given.
        """
        if self._template is None:
            return self._plain_messages(observations, before)
        numbers = [number for number, message in enumerate(observations) if message["role"] != "assistant"]
        conversation = [*messages, {"role": "assistant", "content": REPLY}, *_marked(observations, numbers)]
        _, found, rest = self._rendered(conversation, tools).rpartition(REPLY)
        if not found:
            raise UserError("environment: the chat template does not write messages of assistant as they are")
        if before[-1] in self.eos_ids:
            rest = rest.removeprefix(self.decode_all([before[-1]]))
        return self._encode_around(rest, observations, numbers, before=before)

    def _plain_messages(self, messages: Messages, before: Sequence[int]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += self.plain_ids(plain_text(message), [*before, *ids])
            if message["role"] == "assistant":
                ids.append(self.eos_ids[0])
        return ids

    def _has_controls(self, message: Mapping[str, Any]) -> bool:
        """Whether a message other than a reply has the text of a control token."""
        return message["role"] != "assistant" and self._has_control(self.encode(message["content"]))

    def _rendered(self, messages: Messages, tools: Any) -> str:
        assert self._template is not None
        try:
            return self._template.render(messages, reply=True, tools=tools)
        except ValueError as error:
            raise UserError(f"environment: {error}") from error

    def _encode_around(
        self, rendered: str, messages: Messages, numbers: Sequence[int], *, before: Sequence[int]
    ) -> list[int]:
        """Encodes a text with marks in place of the contents `numbers`: these as text, the rest with its tokens."""
        first, *pieces = re.split(CONTENT.format(r"(\d+)"), rendered)
        if [int(number) for number in pieces[::2]] != list(numbers):
            roles = ", ".join(dict.fromkeys(messages[number]["role"] for number in numbers))
            raise UserError(f"environment: the chat template does not write messages of {roles} as they are")
        contents = [messages[number]["content"] for number in numbers]
        if not any(self._has_controls(messages[number]) for number in numbers):
            return self.encode(first + "".join(x for pair in zip(contents, pieces[1::2], strict=True) for x in pair))
        ids = self.encode(first)
        for content, scaffold in zip(contents, pieces[1::2], strict=True):
            ids += self.plain_ids(content, [*before, *ids])
            ids += self.encode(scaffold)
        return ids

    def messages(self, example: "Example") -> list[dict[str, Any]]:
        """Returns the messages of a prompt."""
        messages = [{"role": role, "content": text} for role, text in example.conversation()]
        if self._system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system})
        return messages

    @property
    def has_template(self) -> bool:
        """Whether conversations are written by a chat template."""
        return self._template is not None

    def prompt_ids(self, example: "Example") -> list[int]:
        """Encodes the conversation up to the reply, or, without a template, the special ids and the prompt.

        Raises:
          UserError: the template rejects the conversation.
        """
        if self._template is not None and self.tools:
            return self.conversation_ids(self.messages(example), self.tools)
        if self._template is not None:
            return self.encode(self._render(self._template, example, answer=None))
        ids = self.encode(example.prompt)
        return ids if self._first and ids[: len(self._first)] == self._first else [*self._first, *ids]

    def solution_ids(self, example: "Example") -> list[int]:
        """Encodes the solution as the continuation of `prompt_ids`, up to and including EOS.

        With a chat template, the solution is the reply as the template writes it.
        """
        head = self.prompt_ids(example)
        solution = example.solution
        if self._template is not None:
            solution = solution.strip()
            start = self._render(self._template, example, answer=None)
            full = self._render(self._template, example, answer=solution)
            solution = full[len(start) :] if full.startswith(start) else solution
        return self._up_to_end(encode_continuation(self, head, solution))

    def _up_to_end(self, ids: list[int]) -> list[int]:
        """Returns the ids up to and including the first EOS, which is added if there is none."""
        ends = [index for index, token in enumerate(ids) if token in self.eos_ids]
        return ids[: ends[0] + 1] if ends else [*ids, self.eos_ids[0]]

    def _render(self, template: ChatTemplate, example: "Example", *, answer: str | None) -> str:
        messages = self.messages(example)
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        try:
            return template.render(messages, reply=answer is None, tools=self.tools or None)
        except ValueError as error:
            raise UserError(f"data.chat: {error}; prompt {example.prompt[:80]!r}") from error

    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of each id: empty for EOS ids, U+FFFD for ids without a token.

        Raises:
          UserError: the decoder of the tokenizer is not supported.
        """
        try:
            by_id = piece_bytes(self._decoder, self._pieces)
        except ValueError as error:
            raise UserError(f"model.path: {error}") from error
        by_id |= {number: text.encode() for number, text in self._added_texts.items()}
        by_id |= dict.fromkeys(self.eos_ids, b"")
        return [by_id.get(number, UNKNOWN.encode()) for number in range(self.vocab_size)]


def _marked(messages: Messages, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
    """Puts marks in place of the contents of some messages."""
    marks = {number: {"content": CONTENT.format(number)} for number in numbers}
    return [{**message, **marks.get(number, {})} for number, message in enumerate(messages)]


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalnum()
