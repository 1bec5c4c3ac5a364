"""Shared by the tests of the trainer."""

from collections.abc import Iterator

import pytest

from tests import programs


@pytest.fixture(autouse=True, scope="module")
def _kept_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests that make the same program anew compile it once, in whatever process they run."""
    directory = programs.session_directory(tmp_path_factory.getbasetemp()) / "programs"
    with programs.kept_in(directory, written_from=programs.LARGE):
        yield


@pytest.fixture
def write(tmp_path):
    """Write a config file and return its path."""

    def _write(text="steps: 3\n", name="config.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write
