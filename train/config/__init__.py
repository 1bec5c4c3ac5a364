"""The config of a run: schema, checks and loading. Imports neither jax nor kljax, so that mistakes show at once."""

from train.config.errors import ConfigError
from train.config.load import LoadedConfig, dump_yaml, load, parse
from train.config.schema import Config

__all__ = ["Config", "ConfigError", "LoadedConfig", "dump_yaml", "load", "parse"]
