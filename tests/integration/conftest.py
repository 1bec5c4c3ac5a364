"""Runs of the command, shared by the tests that only read what they left."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.integration.command import Run, environment, run, run_here, shared_run
from tests.run_programs import shared_by_runs


@pytest.fixture(scope="session")
def session_directory(tmp_path_factory) -> Path:
    """One directory for all test processes."""
    return programs.session_directory(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True, scope="module")
def _shared_by_runs() -> Iterator[None]:
    """Commands that run in the process of the tests share what they trace, and draw no curves."""
    with shared_by_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.run.run.write_curves", lambda directory: None)
        yield


@pytest.fixture(scope="session")
def env(session_directory) -> dict[str, str]:
    """The environment of the command, with compiled programs kept from run to run."""
    return environment(session_directory)


@pytest.fixture(scope="session")
def train(env) -> Callable[..., Run]:
    """`train(CONFIG, "key=value", ...)`: a run in a process of its own."""
    return lambda *arguments: run(env, *arguments)


@pytest.fixture(scope="session")
def shared(session_directory) -> Callable[..., Run]:
    """`shared(CONFIG, "key=value", ...)`: the one run with these arguments."""
    directory = session_directory / "runs"
    directory.mkdir(exist_ok=True)
    return lambda *arguments, command=run_here: shared_run(directory, *arguments, command=command)


@pytest.fixture(scope="session")
def smoke(shared, train) -> Run:
    """The run of the smallest config, in a process of its own."""
    return shared("configs/smoke.yaml", command=train).succeeded()
