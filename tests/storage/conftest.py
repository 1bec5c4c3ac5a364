"""A server of S3 for all tests of this folder, and an environment in which the commands find it."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command import environment, run
from tests.storage import servers
from tests.storage.runs import QUICK

MISSING = [name for name in ("s3fs", "gcsfs", "moto", "gcp_storage_emulator") if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of this folder where the servers are not installed."""
    if MISSING:
        for item in items:
            if item.nodeid.startswith("tests/storage/"):
                item.add_marker(pytest.mark.skip(reason=f"{', '.join(MISSING)} not installed; run make test-storage"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled programs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def running() -> Iterator[tuple[servers.Proxy, dict[str, str]]]:
    """The server, with its variables."""
    with servers.s3() as started:
        yield started


@pytest.fixture
def s3(running: tuple[servers.Proxy, dict[str, str]]) -> Iterator[servers.Proxy]:
    """The proxy of the server, which passes everything on when a test ends."""
    proxy = running[0]
    proxy.requests.clear()
    yield proxy
    proxy.rule = lambda method, path: None


@pytest.fixture
def env(running: tuple[servers.Proxy, dict[str, str]], cache: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a command."""
    return {**environment(cache), **running[1], "KLJAX_COPIES": str(tmp_path / "copies")}


@pytest.fixture(scope="session")
def local(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same run on this machine, which is not interrupted."""
    output = tmp_path_factory.mktemp("local")
    run(environment(cache), *QUICK, f"output={output}").succeeded()
    return output / "quickstart"
