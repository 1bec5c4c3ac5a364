"""Chat templates: jinja2 templates of a checkpoint, rendered in a sandbox as in transformers."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Messages = Sequence[Mapping[str, str]]


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks text of the assistant; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parses the statements of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


class ChatTemplate:
    """A compiled template with its constant variables.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", {})
        >>> template.render([{"role": "user", "content": "hi"}], reply=False)
        '<user>hi'
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """Compiles `source`; `variables` are the texts of special tokens and the arguments of the config.

        Raises:
          ValueError: `source` is not a jinja2 template.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid jinja2: line {error.lineno}: {error.message}") from error
        self._variables = dict(variables)

    def render(self, messages: Messages, *, reply: bool) -> str:
        """Renders the conversation; with `reply`, up to the start of the next assistant message.

        Raises:
          ValueError: the template rejects the conversation; quotes its message.
        """
        copies = [dict(message) for message in messages]
        try:
            return self._template.render(
                messages=copies, tools=None, documents=None, **self._variables, add_generation_prompt=reply
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template refuses messages of {roles}: {error}") from error
