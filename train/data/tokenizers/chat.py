"""Chat templates, which are treated as untrusted: a worker process renders them, within limits."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from train.data.tokenizers.protocol import Messages
from train.data.workers.process import NoAnswer, NotStarted, WorkerPool

# CPU seconds of one conversation.
SECONDS = 10.0
# A time that differs from any other in each part.
LATER = "2101-02-03T04:05:06.789"
RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}


class ChatTemplate:
    """A template with its constant variables.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {})
        >>> template.render([{"role": "user", "content": "hi"}], reply=False)
        '<user>hi'
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """Checks `source`; `variables` are the texts of special tokens and the arguments of the config.

        Raises:
          ValueError: `source` is not a jinja2 template, or a variable has a name that belongs to the conversation.
        """
        taken = sorted(RESERVED & variables.keys())
        if taken:
            raise ValueError(f"data.template_arguments: got {', '.join(taken)}, which the conversation sets")
        self._source = source
        self._variables = dict(variables)
        checked = self._ask(None)
        if "syntax" in checked:
            raise ValueError(f"the chat template is not valid jinja2: {checked['syntax']}")

    def render(self, messages: Messages, *, reply: bool, tools: Sequence[Any] | None = None) -> str:
        """Renders the conversation; with `reply`, up to the start of the next assistant message.

        `tools` are JSON schemas, as transformers passes them.

        Raises:
          ValueError: the template rejects the conversation, fails, or exceeds a limit; quotes its message.
        """
        conversation = {"messages": [dict(message) for message in messages], "add_generation_prompt": reply}
        rendered = self._ask({**self._variables, **conversation, "tools": tools, "documents": None})
        if "error" in rendered:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template refuses messages of {roles}: {rendered['error']}")
        return rendered["text"]

    def check_repeats(self) -> None:
        """Checks that the template writes a conversation in the same way each time, and on another day.

        Raises:
          ValueError: it does not, so that a run would not continue with the prompts it began with.
        """
        conversation = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True}
        question = {**self._variables, **conversation, "tools": None, "documents": None}
        first, again, later = (self._ask(question, now=now) for now in (None, None, LATER))
        if "error" in later:
            return  # it refuses this conversation
        if first != again:
            raise ValueError(
                "the chat template writes another text each time; set data.chat_template=FILE to one that does not"
            )
        if later != first:
            raise ValueError(
                "the chat template writes the date or the time, and prompts would change with it; set its variable, "
                "such as data.template_arguments={date_string: 26 Jul 2024}, or data.chat_template=FILE"
            )

    def _ask(self, variables: Mapping[str, Any] | None, *, now: str | None = None) -> dict[str, str]:
        question = {"source": self._source, "variables": variables, "now": now}
        try:
            answer: dict[str, str] = _pool().ask(question, cpu_seconds=SECONDS)
        except (NoAnswer, NotStarted) as error:
            raise ValueError(f"the chat template failed: {error}") from None
        return answer


@functools.cache
def _pool() -> WorkerPool:
    return WorkerPool("template")
