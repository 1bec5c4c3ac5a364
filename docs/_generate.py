"""The parts of the pages that come from the code: the API reference, by topic.

A page asks for one with a comment of its own line, such as `<!-- api kl -->`.
"""

import decimal
import functools
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
from kljax.systems._entry import KINDS
from kljax.systems._table import SYSTEMS
from kljax.tools.parity.dump import FIELDS
from kljax.tools.systems.foreign import FOREIGN
from train.config import help as train_help
from train.config.installation import RECIPES
from train.config.messages import show
from train.config.systems import with_meanings
from train.run.glossary import GLOSSARY

NAMESPACES = ("systems", "audit", "checkpoint")
TOPICS = ("kl", "losses", "rewards", "log_probs", "aggregation", "advantages", "ratios", "masking", "controllers")
"""The topics that a reader looks for first, in this order; the others follow by name."""
FIRST_FUNCTIONS = (
    "estimate_kl",
    "reference_kl_loss",
    "kl_shaped_rewards",
    "centered_kl_advantages",
    "token_log_probs",
    "token_weights",
    "grpo_advantages",
    "ppo_clip_loss",
    "truncated_importance_weights",
    "reference_kl",
)
"""The functions of a first loop, in the order in which it meets them; each also opens its topic."""


NOTE = "> `make docs` fills this page's tables, and writes it to `docs/_build`."
"""What a page with generated parts says in the repository."""


def fill(text: str) -> str:
    """The text of a page with each `<!-- KIND ARGUMENTS -->` replaced by what it names; a colon makes a comment."""

    def replace(match: re.Match[str]) -> str:
        kind, *arguments = match.group(1).split()
        return GENERATORS[kind](*arguments)

    return re.sub(r"^<!-- ([^:\n]+) -->$", replace, text.replace(f"{NOTE}\n\n", ""), flags=re.MULTILINE)


def topics() -> dict[str, list[str]]:
    """The public names by topic, which is the module or folder of `kljax` that defines them."""
    by_topic: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for name in sorted(kljax.__all__, key=_place):
        by_topic.setdefault(getattr(kljax, name).__module__.split(".")[1], []).append(name)
    for space in NAMESPACES:
        by_topic[space] = sorted((f"{space}.{name}" for name in getattr(kljax, space).__all__), key=_place)
    return by_topic


def api(topic: str) -> str:
    """The reference of one topic: what its module says, then every public name, by the modules of a folder."""
    parts = [_rst(f".. automodule:: kljax.{topic}\n   :no-index:\n")]
    for module, names in itertools.groupby(topics()[topic], lambda name: _thing(name).__module__):
        stem = module.split(".")[-1]
        if not module.endswith(f".{topic}") and not stem.startswith("_"):
            parts += [f"## {stem.replace('_', ' ').capitalize()}", _rst(f".. automodule:: {module}\n   :no-index:\n")]
        parts += [_rst(_entry(name)) for name in names]
    return "\n\n".join(parts)


def _rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}```"


def summary() -> str:
    """Every public name with the first sentence of its docstring, by topic."""
    parts = []
    for topic, names in topics().items():
        parts += [f"## [{topic}]({topic}.md)", "", _first_sentences(names), ""]
    return "\n".join(parts)


def first_functions() -> str:
    """The functions to know first."""
    return _first_sentences(FIRST_FUNCTIONS)


def _first_sentences(names: Sequence[str]) -> str:
    lines = ["| name | |", "|---|---|"]
    for name in names:
        first = (inspect.getdoc(_thing(name)) or "").partition("\n")[0].replace("|", "\\|")
        lines.append(f"| {{py:obj}}`{name} <kljax.{name}>` | {first} |")
    return "\n".join(lines)


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
    for system in SYSTEMS.values():
        lines.append(f"| [{system.title}]({system.key}.md) | `{system.key}` | {system.version} | {system.default_kl} |")
    return "\n".join(lines)


def system(key: str) -> str:
    """Every name of a system, by kind."""
    parts = []
    for kind, title in KINDS.items():
        rows = [row for row in kljax.systems.entries() if row.system == key and row.kind == kind]
        if rows:
            common = {field: _common(rows, field) for field in ("option", "defaults")}
            said = "; ".join(f"{label}: {text}" for label, text in common.items() if text)
            parts += [
                f"### {title[0].upper()}{title[1:]}",
                "",
                _escaped(said[:1].upper() + said[1:]),
                "",
                _table(rows, common),
                "",
            ]
    return "\n".join(parts)


def presets(key: str) -> str:
    """The presets of a system, with the setting that each stands for, and the fields that take its names."""
    lines = ["| preset | of |", "|---|---|"]
    for path in sorted((RECIPES / "presets" / key).glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"| `preset: {key}/{path.stem}` | {_escaped(first)} |")
    return "\n".join(lines)


def config(key: str) -> str:
    """The options of a system's config, with the fields of the trainer."""
    lines = ["| option | field | |", "|---|---|---|"]
    for option in FOREIGN[key].options:
        fields = ", ".join(f"`{field}`" for field in option.fields) or "none"
        lines.append(f"| `{option.name}` | {fields} | {_escaped(option.note)} |")
    return "\n".join(lines)


def names(kind: str) -> str:
    """The names of a kind that two or more systems use, with each of their meanings."""
    shared: dict[str, list[Any]] = {}
    for row in kljax.systems.entries():
        if row.kind == kind:
            shared.setdefault(row.name.lower().replace("_", "-"), []).append(row)
    lines = ["| name | system | here | clamps | gradient |", "|---|---|---|---|---|"]
    for rows in shared.values():
        if len({row.system for row in rows}) == 1:
            continue
        meanings: dict[tuple[str, ...], list[Any]] = {}
        for row in rows:
            corrected = "<br>and `sampling_log_probs`" if "sampling_log_probs" in row.sources else ""
            meanings.setdefault((_call(row) + corrected, row.clamps, row.gradient), []).append(row)
        for number, ((here, clamps, gradient), same) in enumerate(meanings.items()):
            name = _code(rows[0].name) if number == 0 else ""
            titles = ", ".join(SYSTEMS[row.system].title for row in same)
            lines.append(f"| {name} | {titles} | " + " | ".join(map(_escaped, (here, clamps, gradient))) + " |")
    return "\n".join(lines)


def counts() -> str:
    """How many names there are, and how they are checked."""
    rows = kljax.systems.entries()
    recorded, called = [row for row in rows if row.goldens], [row for row in rows if row.call]
    return (
        f"{len(rows)} names, of which {len(called)} are a call of this library; {len(recorded)} are compared with "
        f"recorded results of the system's own code. The others say why they are not."
    )


def metrics(group: str) -> str:
    """The metrics of a group: meaning, healthy and sick values."""
    lines = ["| metric | meaning | healthy | sick, and what to do |", "|---|---|---|---|"]
    for metric in GLOSSARY:
        if metric.group == group:
            cells = (_code(metric.name), metric.meaning, metric.healthy, metric.sick)
            lines.append("| " + " | ".join(map(_escaped, cells)) + " |")
    return "\n".join(lines)


def dump_fields(kind: str) -> str:
    """The arrays of a parity dump, "input" or "result": name, shape and meaning."""
    lines = [f"| {kind} | shape | |", "|---|---|---|"]
    for name, field in FIELDS.items():
        if field.kind == kind:
            shape = _code(f"[{', '.join(field.axes)}]") if field.axes else "scalar"
            shape = f"`[B]` or {shape}" if field.per_row else shape
            lines.append(f"| {_code(name)} | {shape} | {_escaped(field.text)} |")
    return "\n".join(lines)


CONFIG_FIELDS = {
    "kl": "kl.loss.estimator",
    "reduction": "loss.aggregation",
    "policy_loss": "loss",
    "advantage": "advantage",
    "correction": "correction",
}
"""The field of a config that takes the names of a kind."""


def config_field(row: Any) -> str:
    """The field of a config that takes the name of a row, with the name; empty where no field does."""
    path = CONFIG_FIELDS.get(row.kind)
    if path is None or row.call is None:
        return ""
    arguments = row.call.arguments
    corrected = "sampling_log_probs" in row.sources or arguments.get("gradient") == "weighted_k2"
    if row.kind == "kl" and (arguments.get("gradient") == "none" or arguments.get("estimator") == "k1"):
        # As a loss it would have no gradient, or one whose mean is 0.
        place = {"art": "advantage"}.get(row.system, "reward")
        path = path if corrected or "k2" in arguments.get("gradient", "") else f"kl.{place}.estimator"
    _, _, problems = with_meanings(
        functools.reduce(lambda value, key: {key: value}, reversed(path.split(".")), row.key)
    )
    return "" if problems else f"{path}: {row.key}"


def _here(row: Any) -> str:
    """The call of a row, its part and the arguments that the user supplies, or why it has none."""
    part = [f"computes {row.part}"] if row.part else []
    return "<br>".join([_call(row), *part, *(f"{_code(name)}: {source}" for name, source in row.sources.items())])


def _call(row: Any) -> str:
    return _code(repr(row.call).replace("kljax.", "")) if row.call else row.reason


def _common(rows: Sequence[Any], field: str) -> str:
    """What a field says if it says the same in every row, else nothing."""
    texts = {getattr(row, field) for row in rows}
    return texts.pop() if len(texts) == 1 else ""


def _table(rows: Sequence[Any], common: dict[str, str]) -> str:
    """Rows of the table of names as Markdown; a column that is empty in all of them is left out."""

    def own(row: Any, field: str) -> str:
        return "" if common[field] else getattr(row, field)

    def said(*parts: str) -> str:
        return "<br>".join(part for part in parts if part)

    def there(row: Any) -> str:
        return said(_code(row.name), own(row, "option"))

    def meaning(row: Any) -> str:
        clamps = "" if row.clamps == "none" else f"clamped: {row.clamps}"
        return said(row.meaning, clamps, row.divisors and f"divided by: {row.divisors}")

    def note(row: Any) -> str:
        defaults = own(row, "defaults")
        unchecked = row.reason if row.call else ""
        return said(defaults and f"defaults: {defaults}", row.note, unchecked and f"not recorded: {unchecked}")

    def config(row: Any) -> str:
        field = config_field(row)
        return _code(field) if field else ""

    columns = {
        "there": there,
        "here": _here,
        "in a config": config,
        "what it computes": meaning,
        "gradient": operator.attrgetter("gradient"),
        "note": note,
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


def _error(values: Any, exact: Sequence[decimal.Decimal]) -> float:
    """The largest relative error."""
    return max(float(abs(decimal.Decimal(float(v)) - e) / abs(e)) for v, e in zip(values, exact, strict=True))


def _thing(name: str) -> Any:
    return operator.attrgetter(name)(kljax)


@functools.cache
def _place(name: str) -> tuple[bool, str, bool, int]:
    """Orders names by module and line; modules with functions to know first lead, and those functions in them."""
    thing = _thing(name)
    opening = {_thing(first).__module__ for first in FIRST_FUNCTIONS}
    return (
        thing.__module__ not in opening,
        thing.__module__,
        name not in FIRST_FUNCTIONS,
        inspect.getsourcelines(thing)[1],
    )


def _entry(name: str) -> str:
    thing = _thing(name)
    if inspect.isclass(thing):
        return f".. autoclass:: kljax.{name}\n   :members:\n"
    return f".. {'autofunction' if callable(thing) else 'autodata'}:: kljax.{name}\n"


def algorithms(section: str) -> str:
    """The algorithms that a section of a config can choose: name, function, fields with their defaults."""
    lines = ["| name | function | fields |", "|---|---|---|"]
    for entry in train_help.algorithms(section):
        names = {known.path.rpartition(".")[2]: known for known in entry.fields}
        fields = ", ".join(
            _code(name if known.required else f"{name}: {show(known.default)}") for name, known in names.items()
        )
        ours = entry.function.startswith("kljax.")
        function = f"{{py:func}}`{entry.function}`" if ours else _code(entry.function)
        lines.append(f"| `{entry.name}` | {function}: {_escaped(entry.doc)} | {fields} |")
    return "\n".join(lines)


def left_out(section: str) -> str:
    """The functions of the library that a section has no name for, and why."""
    lines = ["| function | why |", "|---|---|"]
    for name, reason in train_help.LEFT_OUT[section].items():
        lines.append(f"| {{py:func}}`kljax.{name}` | {_escaped(reason)} |")
    return "\n".join(lines)


def arrays(section: str) -> str:
    """The arrays that a function of the user may read."""
    return ", ".join(_code(name) for name in train_help.ARRAYS[section]) + "."


GENERATORS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        api,
        first_functions,
        summary,
        float32,
        versions,
        system,
        names,
        presets,
        config,
        counts,
        dump_fields,
        algorithms,
        left_out,
        arrays,
        metrics,
    )
}
