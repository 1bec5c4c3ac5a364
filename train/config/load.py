"""From a YAML file and `key=value` overrides to a checked Config, or to the list of all that is wrong."""

import copy
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from train.config.adapter import with_adapter
from train.config.checks import cross_field_problems, cross_field_warnings
from train.config.errors import ConfigError, Note, UserError
from train.config.fields import find_field, known_fields
from train.config.installation import RECIPES, recipe_path
from train.config.messages import Location, did_you_mean, dotted, field_problems, show, unknown_field
from train.config.model import expand_preset
from train.config.plan import Plan, divides_by_length
from train.config.presets import OWNED, drop_replaced, leaves, preset_fields, with_preset
from train.config.schema import Config
from train.config.storage import local_problem
from train.config.systems import with_meanings
from train.config.yaml_text import format_yaml, parse_yaml


@dataclass(frozen=True)
class LoadedConfig:
    """A config that passed every check, and what the user should be told about it.

    Attributes:
      origins: where each field that is not a default comes from: a preset, the file or the command line.
    """

    config: Config
    warnings: tuple[str, ...]
    source: Path
    origins: Mapping[str, str] = field(default_factory=dict)


def load(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The config of a file with overrides on top; of two equal keys the last counts.

    Args:
      path: a YAML file with one mapping; a text may be the name of a shipped recipe too.
      overrides: `a.b=c`, where c is YAML; a section, or a mapping such as `data.arguments`, is replaced by `a={b: c}`.

    Raises:
      ConfigError: everything that is wrong, one line per problem.
    """
    if isinstance(path, str) and (problem := local_problem(path)):
        raise ConfigError(path, [f"got {problem}; expected a YAML file of this machine"])
    source = recipe_path(path) if isinstance(path, str) else path
    raw, problems = _read(source)
    replaced = drop_replaced(raw, overrides)
    written = set(_paths(raw))
    problems += apply_overrides(raw, overrides)
    try:
        config, more = parse(raw)
    except ConfigError as error:
        raise ConfigError(str(source), [*problems, *error.problems]) from None
    if problems:
        raise ConfigError(str(source), problems)
    if replaced:
        more = (Note(f"preset: {config.preset} replaces {', '.join(replaced)} of {source}"), *more)
    more = (*map(Note, _dropped_fields(raw, written, overrides)), *more)
    return LoadedConfig(config, more, source, _origins(raw, written, overrides))


def parse(raw: Mapping[str, Any]) -> tuple[Config, tuple[str, ...]]:
    """The config of a nested mapping, and its warnings.

    Raises:
      ConfigError: everything that is wrong with it.
    """
    written = raw
    raw, unknown = with_preset(raw)
    raw = with_adapter(raw)
    raw, notes, misnamed = with_meanings(raw)
    misnamed = [*unknown, *misnamed]
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        problems = field_problems(error)
        distrusted = [location for location, _ in problems]
        lines = [*misnamed, *(line for _, line in problems), *_other_problems(raw, distrusted)]
        raise ConfigError("config", lines) from None
    wrong = [*misnamed, *(problem.text for problem in cross_field_problems(config))]
    if wrong:
        raise ConfigError("config", wrong)
    config, switched = _with_rollout_log_probs(_with_max_length(config))
    notes = [*_beside_preset(written, config), *notes, *switched]
    return config, (*map(Note, notes), *cross_field_warnings(config))


def _beside_preset(written: Mapping[str, Any], config: Config) -> list[str]:
    """Names the fields of the algorithm whose values differ from the values of the preset alone."""
    if config.preset is None:
        return []
    alone = {key: value for key, value in written.items() if key not in OWNED}
    try:
        preset = _with_max_length(Config.model_validate(with_meanings(with_adapter(with_preset(alone)[0]))[0]))
    except ValidationError:
        return []
    paths = [path for path in _paths(written) if path.partition(".")[0] in OWNED]
    # The entries of a list are one field.
    chosen = dict.fromkeys("correction" if path.startswith("correction") else path for path in paths)
    differing = [path for path in chosen if _value(config, path) != _value(preset, path)]
    listed = ", ".join(f"{path} {_shown(_value(config, path))}" for path in differing)
    return [f"preset: {config.preset}, but with {listed}"] if differing else []


def _shown(value: Any) -> str:
    """A value as YAML has it; of a list of entries their types."""
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "type"):
        return " and ".join(entry.type for entry in value)
    return value if isinstance(value, str) else show(value)


def _value(config: Config, path: str) -> Any:
    """The value of a field by its dotted path, None where the chosen variant has no such field."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def fill_mesh(config: Config, devices: int) -> Config:
    """Returns the config with the sizes of axes that are -1, checked again; without such axes it is the same.

    Raises:
      UserError: the other sizes do not divide the devices, or other fields do not fit the sizes.
    """
    try:
        filled = config.with_devices(devices)
    except ValueError as error:
        raise UserError(str(error)) from error
    if filled == config:
        return config
    if problems := cross_field_problems(filled):
        raise ConfigError(f"mesh of {devices} devices", [problem.text for problem in problems])
    return filled


def dump_yaml(config: Config) -> str:
    """Every field of a config as YAML that loads back as an equal config."""
    return format_yaml(config.model_dump(mode="json"))


def with_absolute_paths(config: Config) -> Config:
    """Puts the working directory before the relative paths of a config, as code of the user may leave it later."""
    return Config.model_validate(config.model_dump(mode="json"), context={"start": os.getcwd()})


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Puts each `a.b=c` into the nested mapping; returns an error line for each that fails."""
    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            problems.append(f"{show(override)}: got no '=', expected an override of the form key=value")
        elif not path.strip():
            problems.append(f"{show(override)}: got no field before '=', expected an override of the form key=value")
        elif (found := find_field(path)) is None:
            problems.append(unknown_field(path))
        elif inside := found[0].list_path:
            name = path.removeprefix(f"{inside}.")
            problems.append(f"{path}: a field of the entries of a list; set {inside}=[{{type: ..., {name}: ...}}]")
        else:
            try:
                value, repeated = parse_yaml(text)
            except yaml.YAMLError as error:
                problems.append(f"{path}: got {show(text)}, which is not valid YAML ({_where(error)}); quote it")
                continue
            problems += [f"{path}: in {show(text)}, {line}" for line in repeated]
            _put(raw, found[1], value)
    return problems


def _put(raw: dict[str, Any], keys: list[str], value: Any) -> None:
    path = ""
    for key in keys[:-1]:
        if raw.get(key) is None:
            raw[key] = {}
        path = f"{path}.{key}" if path else key
        if key == "model":  # `model=tiny` with a field of it after
            raw[key] = expand_preset(raw[key])
        tag = known_fields()[path].tag
        if tag is not None and isinstance(raw[key], str):  # `loss=cispo` with a field of it after
            raw[key] = {tag: raw[key]}
        if not isinstance(raw[key], dict):
            return  # not a mapping: validation says so
        raw = raw[key]
    raw[keys[-1]] = value


def _read(source: Path) -> tuple[dict[str, Any], list[str]]:
    """The mapping of a file, and its repeated keys."""
    try:
        text = source.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        hint = did_you_mean(source.stem, [path.stem for path in RECIPES.glob("*.yaml")])
        raise ConfigError(str(source), [f"no file or recipe of this name{hint}"]) from None
    except OSError as error:
        raise ConfigError(str(source), [f"cannot read the config: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(source), [f"not a text file: {error.reason} at byte {error.start}"]) from None
    try:
        raw, repeated = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(str(source), [f"not valid YAML: {_where(error)}"]) from None
    if not isinstance(raw, dict):
        got = "nothing" if raw is None else show(raw)
        raise ConfigError(str(source), [f"got {got}, expected a mapping of fields such as `steps: 100`"])
    return copy.deepcopy(raw), repeated


def _paths(raw: Mapping[str, Any]) -> list[str]:
    return [path for path, _ in leaves(raw)]


def _origins(raw: Mapping[str, Any], written: set[str], overrides: Sequence[str]) -> dict[str, str]:
    """Tells the origin of every field that is not a default; `written` are fields of the file."""
    commanded = [override.partition("=")[0] for override in overrides]
    origins = dict.fromkeys(preset_fields(raw), f"preset {raw.get('preset')}")
    for path in _paths(raw):
        by_command = any(_overlap(path, key) for key in commanded)
        if by_command or path in written:
            origins[path] = "command line" if by_command else "file"
    return origins


def _dropped_fields(raw: Mapping[str, Any], written: Collection[str], overrides: Sequence[str]) -> Iterator[str]:
    """Names the fields of the file, `written`, that a section on the command line drops."""
    left = set(_paths(raw))
    for path in dict.fromkeys(override.partition("=")[0] for override in overrides):
        known = known_fields().get(path)
        dropped = [name for name in written if name.startswith(f"{path}.") and name not in left]
        # A null switches the section off, and another variant has other fields.
        if dropped and path not in left and known is not None and known.tag is None:
            names = ", ".join(sorted(dropped))
            yield f"{path}: drops {names} of the file, as it replaces the section; {path}.FIELD=VALUE changes one field"


def _where(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem or error.context} on line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def _other_problems(raw: Mapping[str, Any], distrusted: Sequence[Location]) -> list[str]:
    """Cross-field problems that rest on valid fields only, so that one run of the command shows them as well."""
    trusted: dict[str, Any] = copy.deepcopy(dict(raw))
    for location in distrusted:
        _drop(trusted, location)
    trusted.setdefault("steps", 1)
    try:
        config = Config.model_validate(trusted)
    except ValidationError:
        return []
    bad = [dotted(location) for location in distrusted]
    return [
        problem.text
        for problem in cross_field_problems(config)
        if not any(_overlap(field, path) for field in problem.fields for path in bad)
    ]


def _overlap(first: str, second: str) -> bool:
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def _drop(raw: Any, location: Location) -> None:
    for key in location[:-1]:
        if isinstance(raw, dict) and isinstance(raw.get(key), list):  # all of the list goes
            location = (key,)
            break
        raw = raw.get(key) if isinstance(raw, dict) else None
    if isinstance(raw, dict):
        raw.pop(location[-1], None)


def _with_max_length(config: Config) -> Config:
    """Fills in the default of `loss.max_length`, so that the config of a run has the number."""
    if config.loss.max_length is not None or not divides_by_length(config):
        return config
    loss = config.loss.model_copy(update={"max_length": config.data.max_completion_length})
    return config.model_copy(update={"loss": loss})


def _with_rollout_log_probs(config: Config) -> tuple[Config, tuple[str, ...]]:
    plan = Plan.of(config)
    if config.rollout.record_log_probs or not plan.rollout_log_probs:
        return config, ()
    rollout = config.rollout.model_copy(update={"record_log_probs": True})
    if config.kl.rollout.coef > 0:
        reader = "kl.rollout.coef > 0"
    elif plan.loss is not None and "rollout_log_probs" in plan.loss:
        reader = f"loss.type {config.loss.type}"
    else:
        reader = f"advantage.type {config.advantage.type}"
    message = f"rollout.record_log_probs: switched on, because {reader} needs the sampler's log-probs"
    return config.model_copy(update={"rollout": rollout}), (message,)
