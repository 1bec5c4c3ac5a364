"""The parts of the pages that come from the code: the API reference, by topic.

A page asks for one with a comment of its own line, such as `<!-- api kl -->`.
"""

import inspect
import operator
import re
from collections.abc import Callable
from typing import Any

import kljax

NAMESPACES = ("systems", "audit")


def fill(text: str) -> str:
    """The text of a page with each `<!-- KIND ARGUMENTS -->` replaced by what it names."""

    def replace(match: re.Match[str]) -> str:
        kind, *arguments = match.group(1).split()
        return GENERATORS[kind](*arguments)

    return re.sub(r"^<!-- (.+) -->$", replace, text, flags=re.MULTILINE)


def topics() -> dict[str, list[str]]:
    """The public names by topic, which is the module or folder of `kljax` that defines them."""
    found: dict[str, list[str]] = {}
    for name in sorted(kljax.__all__, key=_place):
        found.setdefault(getattr(kljax, name).__module__.split(".")[1], []).append(name)
    for space in NAMESPACES:
        if hasattr(kljax, space):
            found[space] = [f"{space}.{name}" for name in getattr(kljax, space).__all__]
    return found


def api(topic: str) -> str:
    """The reference of one topic: what its module says, then every public name."""
    entries = "\n".join(_entry(name) for name in topics()[topic])
    return f"```{{eval-rst}}\n.. automodule:: kljax.{topic}\n   :no-index:\n\n{entries}\n```"


def summary() -> str:
    """Every public name with the first sentence of its docstring, by topic."""
    parts = []
    for topic, names in topics().items():
        parts += [f"## [{topic}]({topic}.md)", "", "| name | |", "|---|---|"]
        for name in names:
            first = (inspect.getdoc(_thing(name)) or "").partition("\n")[0].replace("|", "\\|")
            parts.append(f"| {{py:obj}}`{name} <kljax.{name}>` | {first} |")
        parts.append("")
    return "\n".join(parts)


def _thing(name: str) -> Any:
    return operator.attrgetter(name)(kljax)


def _place(name: str) -> tuple[str, int]:
    """Where a name is defined: its module and line."""
    thing = _thing(name)
    return thing.__module__, inspect.getsourcelines(thing)[1]


def _entry(name: str) -> str:
    thing = _thing(name)
    if inspect.isclass(thing):
        return f".. autoclass:: kljax.{name}\n   :members:\n"
    return f".. {'autofunction' if callable(thing) else 'autodata'}:: kljax.{name}\n"


GENERATORS: dict[str, Callable[..., str]] = {"api": api, "summary": summary}
