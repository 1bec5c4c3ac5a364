"""Worker module: renders chat templates, jinja2 templates of a checkpoint, in a sandbox as in transformers."""

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from train.data.workers.serve import serve

MEMORY = 512 << 20
MAX_CHARACTERS = 10_000_000


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


def _clock(now: str | None) -> datetime.datetime:
    return datetime.datetime.now() if now is None else datetime.datetime.fromisoformat(now)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _render(template: jinja2.Template, variables: dict[str, Any], now: str | None) -> str:
    """Renders piece by piece, up to `MAX_CHARACTERS`; the clock of the template stands at `now`, if that is a time."""
    pieces = []
    size = 0
    for piece in template.generate({"strftime_now": _clock(now).strftime, **variables}):
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"the text has more than {MAX_CHARACTERS:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def reply(question: Any) -> dict[str, str]:
    """Answers `{"source", "variables", "now"}` with a `text`; without variables, the template is only compiled.

    The answer to a template that cannot be compiled is its `syntax` error; to one that fails, its `error`.
    """
    if question is None:
        return {}
    try:
        template = _compile(question["source"])
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": f"line {error.lineno}: {error.message}"}
    except Exception as error:  # jinja2 computes constant expressions: any error of theirs
        return {"syntax": f"{type(error).__name__}: {error}"}
    try:
        variables = question["variables"]
        return {} if variables is None else {"text": _render(template, variables, question["now"])}
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        return {"error": str(error)}
    except Exception as error:  # division by zero, overflow, recursion, memory
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    serve(reply, memory=MEMORY)
