"""The tokenizer of a Hugging Face folder: `tokenizer.json` and what the files beside it say of its special tokens."""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from train.errors import UserError
from train.tokenizer.chat import ChatTemplate
from train.tokenizer.pieces import piece_bytes
from train.tokenizer.protocol import UNKNOWN

if TYPE_CHECKING:
    from train.tasks.task import Example

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FolderTokenizer:
    """`tokenizer.json` as the trainer asks for it; the attributes are those of `train.tokenizer.Tokenizer`.

    Without a chat template a prompt begins with what the tokenizer's post-processor puts first: BOS or nothing. With one,
    the template writes every special token, and nothing is added to it.
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

        Prompt and solution are tokenized as one text where that leaves the prompt's ids as they are, so that a
        tokenizer that begins every text with a space does not put one between them.
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
        plain = self.encode(start)
        whole = self.encode(start + rest)
        return (
            whole[len(plain) :] if whole[: len(plain)] == plain and head[-len(plain) :] == plain else self.encode(rest)
        )

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


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty if there is no such file.

    Raises:
        UserError: the file cannot be read, or holds no JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"model.path: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"model.path: {path} holds {type(value).__name__}, expected a JSON object")
    return value


def _special(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The text of each special token by role; `tokenizer_config.json` counts before the older file."""
    found = {}
    for source in (read_json(folder / "special_tokens_map.json"), config):
        for role in ROLES:
            value = source.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[role] = text
    return found


def _end_ids(folder: Path, tokenizer: tokenizers.Tokenizer, eos_token: str | None) -> list[int]:
    """The tokenizer's own end first, then those that generation stops at."""
    model = read_json(folder / "config.json")
    sources = (read_json(folder / "generation_config.json"), model, model.get("text_config") or {})
    stops: Any = next((ids for ids in (source.get("eos_token_id") for source in sources) if ids is not None), [])
    found = [] if eos_token is None else [tokenizer.token_to_id(eos_token)]
    found += stops if isinstance(stops, list) else [stops]
    known = [number for number in found if isinstance(number, int)]
    if not known:
        raise UserError(
            f"model.path: {folder} names nothing that ends a completion: expected eos_token in tokenizer_config.json "
            "or eos_token_id in generation_config.json or config.json"
        )
    return known


def _template_text(folder: Path, config: Mapping[str, Any], override: str | None) -> str | None:
    if override is not None:
        try:
            return Path(override).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data.chat_template: cannot read {override}: {error}") from error
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    value = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default")
    return value


def _check_vocabulary(folder: Path, size: int) -> None:
    model = read_json(folder / "config.json")
    rows = model.get("vocab_size") or (model.get("text_config") or {}).get("vocab_size")
    if isinstance(rows, int) and size > rows:
        raise UserError(f"model.path: the tokenizer of {folder} has {size} ids, but config.json a vocabulary of {rows}")


def load_folder(
    path: str | Path,
    *,
    chat: bool | None = None,
    system: str | None = None,
    template: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> FolderTokenizer:
    """The tokenizer of a Hugging Face folder.

    Args:
        path: the folder.
        chat: whether prompts go through the chat template; None: where the folder has one.
        system: what the system says first in a conversation.
        template: a jinja file instead of the folder's template.
        arguments: variables of the template, such as `enable_thinking`.

    Raises:
        UserError: a file is missing or cannot be read, nothing ends a completion, or a template is asked for that is
            not there.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"model.path: {folder} has no tokenizer.json; transformers makes it of other tokenizers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own for it
        raise UserError(f"model.path: cannot read {file}: {error}") from error
    config = read_json(folder / "tokenizer_config.json")
    special = _special(folder, config)
    source = _template_text(folder, config, template) if chat is not False else None
    if chat and source is None:
        raise UserError(f"data.chat: got true, but {folder} has no chat template; data.chat_template=FILE gives one")
    if source is None and (system is not None or arguments):
        field = "data.system" if system is not None else "data.template_arguments"
        raise UserError(
            f"{field}: only a chat template reads it, and "
            + ("data.chat is false" if chat is False else f"{folder} has none; data.chat_template=FILE gives one")
        )
    try:
        compiled = None if source is None else ChatTemplate(source, {**special, **(arguments or {})})
    except ValueError as error:
        raise UserError(f"data.chat: {template or folder}: {error}") from error
    _check_vocabulary(folder, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)
    return FolderTokenizer(
        tokenizer,
        special=special,
        eos_ids=_end_ids(folder, tokenizer, special.get("eos_token")),
        add_bos=config.get("add_bos_token"),
        template=compiled,
        system=system,
    )
