"""A tokenizer of the `tokenizers` library as the trainer asks for it."""

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
    """`tokenizer.json` as the trainer asks for it; the attributes are those of `train.data.tokenizers.Tokenizer`.

    Without a chat template a prompt begins with what the tokenizer's post-processor puts first: BOS or nothing. With
    one, the template writes every special token, and nothing is added to it.
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
        """Wrap `tokenizer`.

        Args:
          tokenizer: what is wrapped; its padding and truncation are switched off.
          special: text of each special token by its role (`bos_token`, ...).
          eos_ids: what ends a completion, at least one.
          add_bos: whether a prompt without a template begins with BOS; None: as the post-processor says.
          template: renders prompts as conversations; None: prompts are plain text.
          system: what the system says first in a conversation.
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

    @property
    def chats(self) -> bool:
        """Whether prompts are rendered by a chat template."""
        return self._template is not None

    def _id(self, text: str | None) -> int | None:
        return None if text is None else self._tokenizer.token_to_id(text)

    def _first_ids(self, add_bos: bool | None) -> list[int]:
        """What comes before the text of a prompt without a template."""
        framed, plain = self._tokenizer.encode("a").ids, self.encode("a")
        first = framed[: next(i for i in range(len(framed) + 1) if framed[i : i + len(plain)] == plain)]
        if add_bos and self.bos_id is not None and self.bos_id not in first:
            return [self.bos_id, *first]
        return [token for token in first if add_bos is not False or token != self.bos_id]

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone; texts of special tokens in it become those. A lone surrogate becomes "?"."""
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        return list(self._tokenizer.encode(clean, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, what ends a completion left out.

        Other special tokens show as they are written and ids without a token as U+FFFD: what was sampled must not
        vanish from what the verifier reads.
        """
        texts: list[str] = []
        run: list[int] = []
        for token in ids:
            if token in self._pieces:
                run += [token] if token not in self.eos_ids else []
            else:
                texts += [self._tokenizer.decode(run, skip_special_tokens=False), UNKNOWN]
                run = []
        return "".join([*texts, self._tokenizer.decode(run, skip_special_tokens=False)])

    def prompt_ids(self, example: "Example") -> list[int]:
        """The conversation up to the reply with a template, else the prompt after what the tokenizer puts first.

        Raises:
          UserError: the template refuses the conversation.
        """
        if self._template is not None:
            return self.encode(self._render(self._template, example, answer=None))
        ids = self.encode(example.prompt)
        return ids if self._first and ids[: len(self._first)] == self._first else [*self._first, *ids]

    def solution_ids(self, example: "Example") -> list[int]:
        """What follows `prompt_ids` where the solution is known, up to and with what ends it.

        Prompt and solution are tokenized as one text where that leaves the prompt's ids as they are: a tokenizer that
        begins every text with a space does not put one between them.
        """
        head, end = self.prompt_ids(example), self.eos_ids[0]
        if self._template is None:
            tail = self._continued(example.prompt, example.solution, head)
        else:
            start = self._render(self._template, example, answer=None)
            whole = self._render(self._template, example, answer=example.solution.strip())
            rest = whole[len(start) :] if whole.startswith(start) else example.solution.strip()
            tail = self._continued(start, rest, head)
        ends = [place for place, token in enumerate(tail) if token in self.eos_ids]
        return tail[: ends[0] + 1] if ends else [*tail, end]

    def _continued(self, start: str, rest: str, head: list[int]) -> list[int]:
        """The ids of `rest` after `start`, whose ids end `head`; a newline stands for `start` where they merge."""
        for before in (start, "\n"):
            known, whole = self.encode(before), self.encode(before + rest)
            if whole[: len(known)] == known and (before != start or head[-len(known) :] == known):
                return whole[len(known) :]
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
        """What each id adds to a text: nothing for what ends a completion, U+FFFD for ids without a token.

        Raises:
          UserError: the decoder of the tokenizer is of a kind whose bytes are not known.
        """
        return list(self._bytes)

    @cached_property
    def _bytes(self) -> list[bytes]:
        decoder = json.loads(self._tokenizer.to_str())["decoder"]
        try:
            known = piece_bytes(decoder, {n: piece for n, piece in self._pieces.items() if n not in self._added})
        except ValueError as error:
            raise UserError(f"model.path: {error}") from error
        known |= {number: text.encode() for number, text in self._added.items()} | dict.fromkeys(self.eos_ids, b"")
        return [known.get(number, UNKNOWN.encode()) for number in range(self.vocab_size)]
