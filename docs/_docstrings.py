"""Docstrings of the library as reStructuredText.

They are written as plain text: code stands between single backticks, formulas and tables are indented, and characters
that reStructuredText would take for markup mean themselves.
"""

import re

DOCTEST = ">>>"
LITERAL_INDENT = 4


def to_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring, with code, formulas and special characters marked up."""
    result: list[str] = []
    previous, blank, literal = "", False, None
    doctest = False
    for line in re.sub(r"\nRaises:\n +Nothing\.\n", "\n", "\n".join(lines)).split("\n"):
        if not line.strip():
            result.append("")
            blank, doctest = True, False
            continue
        indent = len(line) - len(line.lstrip())
        doctest = doctest or line.lstrip().startswith(DOCTEST)
        if literal is not None and indent < literal:
            literal = None
        started = blank and not doctest and indent - (len(previous) - len(previous.lstrip())) >= LITERAL_INDENT
        if literal is None and started:
            literal = indent
            result += [" " * (len(previous) - len(previous.lstrip())) + "::", ""]
        result.append(line if doctest or literal is not None else _inline(line))
        previous = line if literal is None else previous
        blank = False
    return result


def _inline(line: str) -> str:
    """One line of prose: `code` becomes ``code``, everything else is kept from being markup."""
    parts = line.split("`")
    if len(parts) % 2 == 0:  # code that goes on in the next line cannot be told from prose
        raise ValueError(f"a backtick without its partner: {line!r}")
    for position, part in enumerate(parts):
        parts[position] = f"``{part}``" if position % 2 else re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", part)
    return "".join(parts)
