"""Configs of tests, made from `key=value` overrides."""

from pathlib import Path

import pytest

from train.config.errors import ConfigError
from train.config.load import apply_overrides, load, parse
from train.config.schema import Config


def build(*overrides: str, **raw: object) -> tuple[Config, tuple[str, ...]]:
    """Returns a config with these values and overrides, and its warnings."""
    values = {"steps": 5, **raw}
    assert apply_overrides(values, overrides) == []
    return parse(values)


def problems(*overrides: str, **raw: object) -> list[str]:
    """Returns the problems that a config is refused for."""
    with pytest.raises(ConfigError) as caught:
        build(*overrides, **raw)
    return list(caught.value.problems)


def problems_of_file(path: str | Path, *overrides: str) -> tuple[str, ...]:
    """Returns the problems that a file with overrides is refused for, each of which the message has."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return caught.value.problems
