"""The `Tokenizer` protocol for a tokenizer of the `tokenizers` library."""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import tokenizers

from train.config.errors import UserError
from train.data.tokenizers.chat import ChatTemplate
from train.data.tokenizers.pieces import piece_bytes
from train.data.tokenizers.protocol import UNKNOWN

if TYPE_CHECKING:
    from train.data.tasks.task import Example


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
        self._tokenizer, self._template, self._system = tokenizer, template, system
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._pieces = {number: piece for piece, number in tokenizer.get_vocab(with_added_tokens=True).items()}
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.vocab_size = max(self._pieces) + 1
        self.bos_id = self._id(special.get("bos_token"))
        pad = self._id(special.get("pad_token"))
        self.pad_id = self.eos_ids[0] if pad is None else pad
        self._first = self._first_ids(add_bos)

    def _id(self, text: str | None) -> int | None:
        return None if text is None else self._tokenizer.token_to_id(text)

    def _first_ids(self, add_bos: bool | None) -> list[int]:
        """Finds the special ids before the text of a prompt without a template."""
        processed, plain = self._tokenizer.encode("a").ids, self.encode("a")
        starts = (i for i in range(len(processed) + 1) if processed[i : i + len(plain)] == plain)
        start = next(starts, None)
        if start is None:
            raise UserError("model.path: the post-processor of tokenizer.json changes the tokens of a text")
        first = processed[:start]
        if add_bos and self.bos_id is not None and self.bos_id not in first:
            return [self.bos_id, *first]
        return [token for token in first if add_bos is not False or token != self.bos_id]

    def encode(self, text: str) -> list[int]:
        """Encodes `text` alone; texts of special tokens become their ids, a lone surrogate becomes "?"."""
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        return list(self._tokenizer.encode(clean, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes `ids` without EOS ids.

        Other special tokens keep their text, and ids without a token become U+FFFD: every sampled token must stay
        visible to the verifier.
        """
        return self.decode_all(token for token in ids if token not in self.eos_ids)

    def decode_all(self, ids: Iterable[int]) -> str:
        """Decodes `ids` with the text of every special token; ids without a token become U+FFFD."""
        texts: list[str] = []
        run: list[int] = []
        for token in ids:
            if token in self._pieces:
                run.append(token)
            else:
                texts += [self._tokenizer.decode(run, skip_special_tokens=False), UNKNOWN]
                run = []
        return "".join([*texts, self._tokenizer.decode(run, skip_special_tokens=False)])

    def prompt_ids(self, example: "Example") -> list[int]:
        """Encodes the conversation up to the reply, or, without a template, the special ids and the prompt.

        Raises:
          UserError: the template rejects the conversation.
        """
        if self._template is not None:
            return self.encode(self._render(self._template, example, answer=None))
        ids = self.encode(example.prompt)
        return ids if self._first and ids[: len(self._first)] == self._first else [*self._first, *ids]

    def solution_ids(self, example: "Example") -> list[int]:
        """Encodes the solution as the continuation of `prompt_ids`, up to and including EOS.

        Prompt and solution are tokenized as one text if that preserves the ids of the prompt, so that a tokenizer that
        starts every text with a space does not put a space between them.
        """
        head, end = self.prompt_ids(example), self.eos_ids[0]
        if self._template is None:
            tail = self._encode_continuation(example.prompt, example.solution, head)
        else:
            start = self._render(self._template, example, answer=None)
            full = self._render(self._template, example, answer=example.solution.strip())
            rest = full[len(start) :] if full.startswith(start) else example.solution.strip()
            tail = self._encode_continuation(start, rest, head)
        ends = [index for index, token in enumerate(tail) if token in self.eos_ids]
        return tail[: ends[0] + 1] if ends else [*tail, end]

    def _encode_continuation(self, start: str, rest: str, head: list[int]) -> list[int]:
        """Encodes `rest` as it follows `start`, the end of `head`; where the two merge, as it follows a newline."""
        for before in (start, "\n"):
            prefix, full = self.encode(before), self.encode(before + rest)
            if full[: len(prefix)] == prefix and (before != start or head[-len(prefix) :] == prefix):
                return full[len(prefix) :]
        return self.encode(rest)

    def _render(self, template: ChatTemplate, example: "Example", *, answer: str | None) -> str:
        messages = [{"role": role, "content": text} for role, text in example.conversation()]
        if self._system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        try:
            return template.render(messages, reply=answer is None)
        except ValueError as error:
            raise UserError(f"data.chat: {error}; prompt {example.prompt[:80]!r}") from error

    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of each id: empty for EOS ids, U+FFFD for ids without a token.

        Raises:
          UserError: the decoder of the tokenizer is not supported.
        """
        return list(self._bytes)

    @cached_property
    def _bytes(self) -> list[bytes]:
        decoder = json.loads(self._tokenizer.to_str())["decoder"]
        try:
            by_id = piece_bytes(decoder, {n: piece for n, piece in self._pieces.items() if n not in self._added})
        except ValueError as error:
            raise UserError(f"model.path: {error}") from error
        by_id |= {number: text.encode() for number, text in self._added.items()} | dict.fromkeys(self.eos_ids, b"")
        return [by_id.get(number, UNKNOWN.encode()) for number in range(self.vocab_size)]
