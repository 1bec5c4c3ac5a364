"""Conversations of episodes in the form of a model family, by the package `renderers` in place of a chat template."""

import itertools
import threading
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from train.config.errors import UserError, warn
from train.data.tokenizers.calls import ReadTurn, ToolCall, parse_turn
from train.data.tokenizers.continuation import decode_continuation, encode_continuation
from train.data.tokenizers.folder import FolderTokenizer
from train.data.tokenizers.protocol import EpisodeTokenizer, Messages

if TYPE_CHECKING:
    from train.data.tasks.task import Example

PROBLEMS = {
    "invalid_json": "the call is not JSON",
    "unclosed_block": "the call has no end",
    "missing_name": "the call has no name",
}
"""Why a call cannot be read, by its status."""
LEFT_OUT = {"auto", "default", "custom", "gpt-oss", "gemma4", "inkling", "kimi-k2", "kimi-k2.5"}
"""Renderers of no family, one with a vocabulary of its own, and four that repeat the call in its result."""

_SHOWN = 12
"""Tokens of a prompt that a warning quotes."""


def read_turn(
    tokenizer: EpisodeTokenizer,
    names: Sequence[str],
    *,
    prompt: Sequence[int],
    ids: Sequence[int],
    text: str,
    tools: Any = None,
) -> ReadTurn:
    """Finds the tool calls of a sampled turn, in the form of the family if the tokenizer knows it.

    Args:
      tokenizer: of the episode.
      names: of the tools.
      prompt: all ids before the turn.
      ids: of the turn.
      text: of these.
      tools: JSON schemas of the tools.
    """
    if isinstance(tokenizer, RenderedTokenizer):
        return tokenizer.read_turn(prompt, ids, text, tools)
    return parse_turn(text, names)


class RenderedTokenizer(FolderTokenizer):
    """A tokenizer whose conversations and tool calls have the form of a family that the package `renderers` knows.

    Sampled ids are kept, and a text with control tokens stays text, as with a chat template: the package gets such a
    text with separators within the control tokens' texts, at which it is encoded in parts.
    """

    def __init__(
        self,
        folder: FolderTokenizer,
        family: str,
        arguments: Mapping[str, Any],
        field: str = "environment.renderer",
    ) -> None:
        """Makes the renderer of a family.

        Args:
          folder: the tokenizer of the model.
          family: name of the renderer.
          arguments: variables of the chat template that the family has, such as `enable_thinking`.
          field: of the config, which names the family.

        Raises:
          UserError: the package is missing or does not know the family, or this does not go with the tokenizer.
        """
        self.__dict__.update(folder.__dict__)
        self._family = family
        self._field = field
        self._renderer_tokenizer = _RendererTokenizer(self)
        self._renderer = _make_renderer(self._renderer_tokenizer, family, arguments, field)
        # Requests of an endpoint come in several threads, and a message has its separator meanwhile.
        self._rendering = threading.Lock()
        self._check_controls()

    @property
    def has_template(self) -> bool:
        """Whether conversations have control tokens: always."""
        return True

    def prompt_ids(self, example: "Example") -> list[int]:
        """Encodes the conversation up to the reply."""
        return self.conversation_ids(self.messages(example), self.tools)

    def solution_ids(self, example: "Example") -> list[int]:
        """Encodes the solution as the family writes a reply, up to and including EOS."""
        head = self.prompt_ids(example)
        reply = {"role": "assistant", "content": example.solution.strip()}
        full = self._ids([*self.messages(example), reply], self.tools, reply=False)
        written = full[: len(head)] == head
        return self._up_to_end(full[len(head) :] if written else encode_continuation(self, head, reply["content"]))

    def conversation_ids(self, messages: Messages, tools: Any = None) -> list[int]:
        """Encodes messages up to the next reply; only a reply may have control tokens.

        Raises:
          UserError: the family has no form for the messages.
        """
        return self._ids(messages, tools, reply=True)

    def observation_ids(
        self, messages: Messages, observations: Messages, *, before: Sequence[int], tools: Any = None
    ) -> list[int]:
        """Encodes what follows a sampled reply up to the next one, without the ids before it.

        Raises:
          UserError: the family has no form for the messages.
        """
        # The last id alone is the completion: of a longer one, the package drops what follows an end within it.
        bridged = self._bridged(before[:-1], before[-1:], observations, tools)
        if bridged is None:
            # It refuses a reply that ended while it was thinking; what follows does not depend on the reply.
            before = [self.eos_ids[0], before[-1]]
            bridged = self._bridged(before[:1], before[1:], observations, tools)
        if bridged is None or bridged[: len(before)] != list(before):
            roles = ", ".join(message["role"] for message in observations)
            raise UserError(
                f"{self._field}: {self._family} does not go on after a sampled reply with messages of {roles}"
            )
        return bridged[len(before) :]

    def read_turn(self, prompt: Sequence[int], ids: Sequence[int], text: str, tools: Any = None) -> ReadTurn:
        """Finds the tool calls of a sampled turn; a call before the end of its thinking is none.

        Args:
          prompt: all ids before the turn.
          ids: of the turn.
          text: of these.
          tools: JSON schemas of the tools.
        """
        try:
            parsed = self._renderer.parse_response(list(ids), tools=tools or None, prompt_ids=list(prompt))
        except Exception as error:  # a turn has any text, and a parser any fault
            return ReadTurn(text, [ToolCall("", "", f"the call cannot be read: {type(error).__name__}")])
        if not parsed.tool_calls:
            return ReadTurn(text, [])
        span = parsed.tool_calls[0].token_span
        before = parsed.content if span is None else decode_continuation(self, prompt, ids[: span[0]])
        return ReadTurn(before.strip(), [_call(call) for call in parsed.tool_calls])

    def warn_of_template(self, template: FolderTokenizer) -> None:
        """Warns if the chat template of the folder writes a prompt otherwise: a server or a fine-tune may go by it."""
        if not template.has_template:
            return
        messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
        try:
            expected = template.conversation_ids(messages, self.tools)
            ids = self.conversation_ids(messages, self.tools)
        except UserError:
            return
        pairs = enumerate(itertools.zip_longest(ids, expected))
        first = next((number for number, (ours, theirs) in pairs if ours != theirs), None)
        if first is None:
            return
        ours, theirs = (repr(self.decode_all(row[first : first + _SHOWN])) for row in (ids, expected))
        warn(
            f"{self._field}: {self._family} writes a prompt otherwise than the chat template of model.path: "
            f"{ours} for {theirs}, from token {first} on; episodes have the form of {self._family}"
        )

    def _ids(self, messages: Messages, tools: Any, *, reply: bool) -> list[int]:
        render = self._renderer.render
        rendered = self._say(lambda said: render(said, tools=tools or None, add_generation_prompt=reply), messages)
        return list(rendered.token_ids)

    def _bridged(
        self, prompt: Sequence[int], completion: Sequence[int], observations: Messages, tools: Any
    ) -> list[int] | None:
        def bridge(said: list[dict[str, Any]]) -> Any:
            return self._renderer.bridge_to_next_turn(list(prompt), list(completion), said, tools=tools or None)

        bridged = self._say(bridge, observations)
        return None if bridged is None else list(bridged.token_ids)

    def _say(self, render: Callable[[list[dict[str, Any]]], Any], messages: Messages) -> Any:
        """Calls the renderer with messages whose control tokens' texts are divided."""
        separator = _separator(messages)
        said = [dict(message) for message in messages]
        for message in said:
            if message["role"] != "assistant":
                message["content"] = self._divided(message["content"], separator)
        with self._rendering:
            self._renderer_tokenizer.separator = separator
            try:
                rendered = render(said)
            except UserError:
                raise
            except Exception as error:  # those of a family are of any kind
                roles = ", ".join(message["role"] for message in messages)
                raise UserError(
                    f"{self._field}: {self._family} refuses messages of {roles}: {_one_line(error)}"
                ) from error
            finally:
                self._renderer_tokenizer.separator = None
        if rendered is not None:
            # A family leaves out a message that it has no form for.
            for lost in {*range(len(said))} - {*rendered.message_indices}:
                if said[lost]["role"] != "assistant" and said[lost]["content"].strip():
                    raise UserError(f"{self._field}: {self._family} has no form for a message of {said[lost]['role']}")
        return rendered

    def _divided(self, text: str, separator: str) -> str:
        """Puts separators into the control tokens' texts of a text that would become such tokens."""
        if not self._has_control(self.encode(text)):
            return text
        pieces = self._without_controls(text)
        self._check_without_controls((token for piece in pieces for token in self.encode(piece)), text)
        return separator.join(pieces)

    def _check_controls(self) -> None:
        """Checks that texts of control tokens stay text in prompts and observations, wherever the family puts them."""
        text = " ".join(self._marks)
        user = {"role": "user", "content": "a"}
        for role in ("user", "tool"):
            message = {"role": role, "content": "a"}
            controls = {"role": role, "content": text}
            asked = [self.conversation_ids([user]), self.conversation_ids([{**user, "content": text}])]
            said = [self.observation_ids([user], [m], before=[*asked[0], self.eos_ids[0]]) for m in (message, controls)]
            for ids in (asked, said):
                count, other = (sum(token in self._added for token in row) for row in ids)
                if count != other:
                    raise UserError(
                        f"{self._field}: got {self._family!r}, which makes control tokens of texts in messages "
                        f"of {role}; leave it out"
                    )


class _RendererTokenizer:
    """A tokenizer as the package asks for it.

    Attributes:
      separator: divides texts into parts that are encoded one after another; None: no text has one.
    """

    name_or_path = ""
    unk_token_id = None

    def __init__(self, tokenizer: RenderedTokenizer) -> None:
        self.separator: str | None = None
        self.eos_token_id = tokenizer.eos_ids[0]
        self._tokenizer = tokenizer

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        first, *pieces = [text] if self.separator is None else text.split(self.separator)
        ids = self._tokenizer.encode(first)
        for piece in pieces:
            ids += encode_continuation(self._tokenizer, ids, piece)
        return ids

    def decode(self, token_ids: Iterable[int], *_: Any, **__: Any) -> str:
        return self._tokenizer.decode_all(token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer._id(tokens)
        return [self._tokenizer._id(token) for token in tokens]


def _make_renderer(tokenizer: _RendererTokenizer, family: str, arguments: Mapping[str, Any], field: str) -> Any:
    try:
        import renderers
    except ImportError as error:
        raise UserError(
            f"{field}: got {family!r}, which needs a package: pip install 'kljax[train,renderers]' ({error})"
        ) from None
    known = {
        made.model_fields["name"].default: made
        for made in typing.get_args(typing.get_args(renderers.RendererConfig)[0])
    }
    families = sorted(known.keys() - LEFT_OUT)
    if family not in families:
        raise UserError(f"{field}: got {family!r}, expected one of {', '.join(families)}")
    try:
        # Turns go on across messages of a user, whose template would drop thinking before them.
        config = renderers.merge_chat_template_kwargs(known[family](thinking_retention="all"), arguments)
    except (ValueError, TypeError) as error:
        raise UserError(f"data.template_arguments: {field} {family} refuses them: {_one_line(error)}") from None
    try:
        return renderers.create_renderer(tokenizer, config)
    except Exception as error:  # each family looks for its tokens in its own way
        raise UserError(
            f"{field}: got {family!r}, but the tokenizer of model.path is of another family: {_one_line(error)}"
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _separator(messages: Messages) -> str:
    """Chooses a text that no message has, of letters that no family escapes."""
    texts = [str(message) for message in messages]
    candidates = (f"~kljax{number}~" for number in itertools.count())
    return next(text for text in candidates if not any(text in said for said in texts))


def _call(call: Any) -> ToolCall:
    """Converts a call of the package; an unknown tool is refused by the environment, which names the others."""
    status = str(call.status)
    if status not in {"ok", "unknown_tool"}:
        return ToolCall(call.name or "", "", PROBLEMS.get(status, "the call cannot be read"))
    if not call.name:
        return ToolCall("", "", PROBLEMS["missing_name"])
    arguments = {} if call.arguments is None else call.arguments
    if not isinstance(arguments, dict):
        return ToolCall(call.name, "", "the arguments are no object")
    return ToolCall(call.name, arguments)
