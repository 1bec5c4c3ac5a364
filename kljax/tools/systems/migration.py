"""The translation of a config of another trainer."""

import dataclasses
import fnmatch
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kljax.systems._table import SYSTEMS
from kljax.tools.systems.foreign import FOREIGN, NotExpressed


@dataclasses.dataclass(frozen=True)
class Translation:
    """A config of another trainer.

    Attributes:
      fields: the fields of this one, by dotted path.
      not_expressed: options that have no field for their value, each with the value and the reason.
      unknown: options of the file that the table does not have.
    """

    fields: Mapping[str, Any]
    not_expressed: tuple[tuple[str, Any, str], ...]
    unknown: tuple[str, ...]


def read_config(path: pathlib.Path) -> dict[str, Any]:
    """Reads a config of another trainer, JSON, YAML or TOML by its suffix.

    Raises:
      ValueError: it is no mapping, cannot be parsed, or YAML has no parser here.
    """
    suffix = path.suffix.lower()
    text = path.read_text(encoding="utf-8")
    if suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    if suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise ValueError(f"{path}: YAML needs PyYAML: pip install pyyaml, or write the config as JSON") from None
        try:
            read = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    else:
        try:
            read = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; expected JSON, or a file called .yaml or .toml") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path}: got a {type(read).__name__}, expected a mapping of options")
    return read


def flattened(config: Mapping[str, Any], known: frozenset[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of every option."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in known:
            yield from flattened(value, known, f"{name}.")
        else:
            yield name, _number(value)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as text; other texts stay, such as a name of digits."""
    exponential = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
    return float(value) if exponential else value


def translate(system: str, config: Mapping[str, Any]) -> Translation:
    """Translates a config of another trainer.

    Args:
      system: a key of `FOREIGN`.
      config: as its file says; what it leaves out has the default of the system.
    """
    options = FOREIGN[system].options
    given = dict(flattened(config, frozenset(option.name for option in options)))
    values = {**FOREIGN[system].read_by_others, **{option.name: option.default for option in options}, **given}
    fields: dict[str, Any] = {}
    not_expressed: list[tuple[str, Any, str]] = []
    for option in options:
        value = values[option.name]
        if option.convert is None:
            if option.name in given and value != option.default and value is not None:
                not_expressed.append((option.name, value, option.note))
            continue
        try:
            fields |= option.convert(value, values)
        except NotExpressed as error:
            not_expressed.append((option.name, value, str(error)))
    names = {option.name for option in options}
    # An option that is off changes no update.
    asked = [name for name, value in given.items() if name not in names and value not in (None, False, 0, "", [], {})]
    quiet = FOREIGN[system].quiet
    unknown = [name for name in asked if not any(fnmatch.fnmatch(name, pattern) for pattern in quiet)]
    return Translation(fields, tuple(not_expressed), tuple(unknown))


def as_yaml(system: str, translation: Translation) -> Iterator[str]:
    """Yields the lines of the trainer's config; what it leaves out is in comments."""
    unset = [field for field in ("task", "data", "model.path", "steps") if field not in translation.fields]
    yield f"# From {SYSTEMS[system].title}'s config. Set {', '.join(unset)}."
    for name, value, reason in translation.not_expressed:
        yield f"# not expressed: {name}: {json.dumps(value)}: {reason}"
    if translation.unknown:
        yield f"# not known: {', '.join(translation.unknown)}"
    tree: dict[str, Any] = {}
    for path, value in translation.fields.items():
        *sections, last = path.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    yield from _yaml_lines(tree, "")


def _yaml_lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {json.dumps(value)}"
