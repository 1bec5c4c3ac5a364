"""The fields and the algorithms of a config as text, for `--help` and for the documentation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from train.config.algorithms import (
    ADVANTAGES,
    CONTROLLERS,
    ENTROPY_CONTROLLERS,
    KL_SCHEDULES,
    LOSS_FUNCTIONS,
    NOT_CORRECTIONS,
    NOT_ESTIMATORS,
    NOT_POLICY_LOSSES,
    OPTIMIZERS,
)
from train.config.correction import CORRECTIONS
from train.config.fields import Known, known_fields, variant_fields
from train.config.installation import RECIPES, as_installed, shell_command
from train.config.messages import show
from train.config.plan import ADVANTAGE_ARRAYS, CORRECTION_ARRAYS, LOSS_ARRAYS
from train.config.signatures import read_signature

FAMILIES: Mapping[str, Mapping[str, str]] = {
    "loss": LOSS_FUNCTIONS,
    "advantage": ADVANTAGES,
    "correction": CORRECTIONS,
    "kl.loss.controller": CONTROLLERS,
    "kl.loss.controller.schedule": KL_SCHEDULES,
    "loss.entropy_controller": ENTROPY_CONTROLLERS,
    "optim.optimizer": OPTIMIZERS,
}
"""The sections that choose an algorithm, with the table of their functions; `kl.reward`, `kl.advantage` have it too."""
LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "loss": NOT_POLICY_LOSSES,
    "advantage": NOT_ESTIMATORS,
    "correction": NOT_CORRECTIONS,
}
"""Functions of the library that a section has no name for, and why."""
ARRAYS: Mapping[str, tuple[str, ...]] = {
    "loss": (*LOSS_ARRAYS,),
    "advantage": (*ADVANTAGE_ARRAYS,),
    "correction": CORRECTION_ARRAYS,
}
"""The arrays that a function of the user may read."""
ALIASES = tuple(f"kl.{name}.controller" for name in ("reward", "advantage"))
"""Sections with the same choices as one of the families."""


@dataclass(frozen=True)
class AlgorithmHelp:
    """One algorithm: its name, its function, the first line of the function's docstring, the fields of its own."""

    name: str
    function: str
    doc: str
    fields: tuple[Known, ...]


def algorithms(section: str) -> Iterator[AlgorithmHelp]:
    """Yields the algorithms of a section of `FAMILIES`, in the order of its table."""
    fields = variant_fields()
    for name, target in FAMILIES[section].items():
        start = f"{section}."
        specific = [
            known
            for (path, variant), known in fields.items()
            if variant == name and path.startswith(start) and "." not in path.removeprefix(start) and _is_own(path)
        ]
        yield AlgorithmHelp(name, target.replace(":", "."), read_signature(target).doc, tuple(specific))


def field_help() -> str:
    """Lists every field that does not depend on an algorithm: name, default, meaning, allowed values."""
    lines = ["fields (key: default):"]
    for path, known in known_fields().items():
        if not known.section and not _is_own(path):
            default = "required" if known.required else show(known.default)
            lines += [f"  {path}: {default}", f"      {known.doc} Expected: {known.expected}."]
    return "\n".join(lines)


def algorithm_help() -> str:
    """Lists every algorithm with its fields."""
    lines = ["algorithms (section={type: name, field: value}; a name alone has the defaults):"]
    for section in FAMILIES:
        also = f", {', '.join(ALIASES)}" if section == "kl.loss.controller" else ""
        lines += ["", f"{section}{also}:"]
        for entry in algorithms(section):
            lines.append(f"  {entry.name}: {entry.function}. {entry.doc}")
            for known in entry.fields:
                default = "required" if known.required else show(known.default)
                name = known.path.rpartition(".")[2]
                lines.append(f"      {name}: {default}. {known.doc} Expected: {known.expected}.")
    return "\n".join(lines)


def search_help(words: Sequence[str]) -> str:
    """Lists the fields and algorithms whose name or meaning contains every word; the case does not matter."""
    lines = [*field_help().splitlines()[1:], *algorithm_help().splitlines()[1:]]
    blocks: list[list[str]] = []
    section = ""
    for line in lines:
        if not line.startswith(" "):
            section = line
        elif line.startswith("      ") and blocks:
            blocks[-1].append(line)
        else:
            blocks.append([f"  {section} {line.strip()}" if section else line])
    matches = [block for block in blocks if all(word.casefold() in "\n".join(block).casefold() for word in words)]
    # Names before meanings.
    matches.sort(key=lambda block: words[0].casefold() not in block[0].partition(": ")[0].casefold())
    if not matches:
        return f"no field or algorithm has {' and '.join(words)}; {shell_command('train')} --help lists all"
    return "\n".join(line for block in matches for line in block)


def overview() -> str:
    """Lists the shipped configs, with the first line of their comments, and the next commands."""
    command = shell_command("train")
    lines = [f"usage: {command} CONFIG [key=value ...]", "", "configs:"]
    paths = sorted(RECIPES.glob("*.yaml"))
    names = [as_installed(f"configs/{path.name}") for path in paths]
    width = max(map(len, names), default=0)
    for name, path in zip(names, paths, strict=True):
        first = as_installed(path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
        lines.append(f"  {name:{width}}  {first}")
    recipe = as_installed("configs/quickstart.yaml")
    lines += [
        "",
        "next:",
        f"  {command} {recipe:{len(recipe) + 12}}# learns to add on a laptop, in minutes",
        f"  {command} {recipe} --explain  # its algorithm in words and formulas",
        f"  {command} {'--help kl':{len(recipe) + 12}}# the fields with a word in them",
    ]
    return "\n".join(lines)


def _is_own(path: str) -> bool:
    """Whether a field belongs to some algorithms of a family, or to a section with the choices of one."""
    section, _, name = path.rpartition(".")
    if section in ALIASES or any(section.startswith(f"{alias}.") for alias in ALIASES):
        return name != "type" or section not in ALIASES
    if section not in FAMILIES or name == "type":
        return False
    return set(known_fields()[path].variants) != set(known_fields()[f"{section}.type"].variants)
