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


GENERATORS: dict[str, Callable[..., str]] = {"api": api, "summary": summary, "float32": float32}
