"""The parts of the pages that come from the code: the API reference, by topic.

A page asks for one with a comment of its own line, such as `<!-- api kl -->`.
"""

import decimal
import inspect
import itertools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
        if hasattr(getattr(kljax, space, None), "__all__"):
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


def float32() -> str:
    """Relative errors of k3 in float32, by the size of the log-ratio."""
    lines = ["| log-ratio | `k3` | its derivative | value as written |", "|---|---|---|---|"]
    bounds = [1e-8, 1e-6, 1e-4, 1e-2, 1.0, 10.0, 50.0]
    for low, high in itertools.pairwise(bounds):
        sizes = np.geomspace(low, high, 100)
        x = np.concatenate([-sizes, sizes]).astype(np.float32)
        value, derivative = jax.vmap(jax.value_and_grad(lambda x: kljax.k3(x, jnp.zeros_like(x))))(x)
        with decimal.localcontext(prec=50):
            inverse = [(-decimal.Decimal(float(v))).exp() for v in x]
            exact = [e - 1 + decimal.Decimal(float(v)) for e, v in zip(inverse, x, strict=True)]
            slope = [1 - e for e in inverse]
            errors = [_error(value, exact), _error(derivative, slope), _error(jnp.exp(-x) - 1 + x, exact)]
        lines.append(f"| {low:g} to {high:g} | " + " | ".join(f"{error:.1e}" for error in errors) + " |")
    return "\n".join(lines)


def versions() -> str:
    """The systems and the versions that were read."""
    lines = ["| system | key | version | its KL unless told otherwise |", "|---|---|---|---|"]
    for system in _systems().values():
        lines.append(f"| [{system.title}]({system.key}.md) | `{system.key}` | {system.version} | {system.default_kl} |")
    return "\n".join(lines)


def system(key: str) -> str:
    """Every name of a system, by kind."""
    parts = []
    for kind, title in _kinds().items():
        rows = [row for row in _rows() if row.system == key and row.kind == kind]
        if rows:
            parts += [f"### {title.capitalize()}", "", _table(rows), ""]
    return "\n".join(parts)


def _table(rows: Sequence[Any]) -> str:
    """Rows of the table of names as Markdown; a column that is empty in all of them is left out."""
    columns: dict[str, Callable[[Any], str]] = {
        "there": lambda row: _code(row.name) + (f"<br>in {row.option}" if row.option else ""),
        "here": lambda row: _code(repr(row.call).replace("kljax.", "")) if row.call else row.reason,
        "given": lambda row: "<br>".join(f"{_code(name)}: {source}" for name, source in row.given.items()),
        "meaning": lambda row: row.meaning,
        "clamps": lambda row: "" if row.clamps == "none" else row.clamps,
        "divisors": lambda row: row.divisors,
        "gradient": lambda row: row.gradient,
        "defaults": lambda row: row.defaults,
        "note": lambda row: row.note,
    }
    cells = {title: [column(row) for row in rows] for title, column in columns.items()}
    shown = [title for title, column in cells.items() if any(column)]
    lines = [" | ".join(shown), "|".join("---" for _ in shown)]
    lines += [" | ".join(_escaped(cells[title][i]) for title in shown) for i in range(len(rows))]
    return "\n".join(f"| {line} |" for line in lines)


def _escaped(text: str) -> str:
    """A cell: `|` ends one, and `*` and `_` would be emphasis outside of code."""
    parts = re.split("(`[^`]*`|<br>)", text.replace("|", "\\|"))
    return "".join(part if part[:1] in "`<" else re.sub(r"([*_<>])", r"\\\1", part) for part in parts)


def _code(text: str) -> str:
    return f"`{text}`"


def _rows() -> Sequence[Any]:
    return kljax.systems.rows() if hasattr(getattr(kljax, "systems", None), "rows") else ()


def _kinds() -> dict[str, str]:
    from kljax.systems._row import KINDS

    return KINDS


def _systems() -> dict[str, Any]:
    from kljax.systems._row import SYSTEMS

    return SYSTEMS


def _error(values: Any, exact: Sequence[decimal.Decimal]) -> float:
    """The largest relative error."""
    return max(float(abs(decimal.Decimal(float(v)) - e) / abs(e)) for v, e in zip(values, exact, strict=True))


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


GENERATORS: dict[str, Callable[..., str]] = {
    function.__name__: function for function in (api, summary, float32, versions, system)
}
