"""Runs of the real command, shared by the tests that only read what they left."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.integration.command import Run, environment, run, shared_run
from train.__main__ import main


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory) -> Path:
    """One directory for all test processes: below it are shared runs and compiled programs."""
    directory = programs.session_directory(tmp_path_factory.getbasetemp()) / "integration"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(autouse=True, scope="module")
def _kept_programs(shared_directory) -> Iterator[None]:
    """Commands that run in the process of the tests keep their programs too."""
    with programs.kept_in(shared_directory.parent / "programs"):
        yield


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


@pytest.fixture
def here(capsys) -> Callable[..., Run]:
    """`here(CONFIG, "key=value", ...)`: the command in this process, for one that ends before it compiles anything."""

    def call(*arguments: object) -> Run:
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Run(code, printed.out, printed.err)

    return call
