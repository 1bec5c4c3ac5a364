"""The hooks of the build: generated parts of pages, and docstrings as the library writes them."""

# ruff: noqa: PLR0917 -- Sphinx passes its arguments by position.

import inspect
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from docs import _docstrings, _generate
from docs._formulas import to_mathml


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _convert, priority=400)  # before napoleon, which has 500
    app.connect("autodoc-skip-member", _skip)
    app.add_html_math_renderer("mathml", (_write_inline, None), (_write_block, None))
    return {"parallel_read_safe": True}


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = _generate.fill(source[0])


def _convert(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _docstrings.to_rst(lines)


def _skip(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    # Fields are documented by their class, in its section "Attributes".
    is_method = inspect.isroutine(thing) or isinstance(thing, (classmethod, staticmethod, property))
    return None if is_method or what != "class" else True


def _write_inline(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(to_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _write_block(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{to_mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode
