"""Runs of the real command, shared by the tests that only read what they left."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.command import Run, environment, run, shared_run


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory) -> Path:
    """One directory for all test processes: below it are shared runs and compiled programs."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "integration"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def env(shared_directory) -> dict[str, str]:
    """The environment of the command, with compiled programs kept from run to run."""
    return environment(shared_directory)


@pytest.fixture(scope="session")
def shared(shared_directory) -> Callable[..., Run]:
    """`shared(CONFIG, "key=value", ..., devices=1)`: the one run with these arguments."""
    return lambda *arguments, devices=1: shared_run(shared_directory, *arguments, devices=devices)


@pytest.fixture
def train(env) -> Callable[..., Run]:
    """`train(CONFIG, "key=value", ...)`: a run of its own."""
    return lambda *arguments: run(env, *arguments)
