"""The run of the faults is that of other tests, and so are its compiled programs."""

from collections.abc import Iterator

import pytest

from tests import programs
from tests.faults import runs
from tests.run_programs import shared_by_runs


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets the runs of a module share a finished run, its compiled programs, and what they trace."""
    runs.share(programs.session_directory(tmp_path_factory.getbasetemp()))
    with shared_by_runs():
        yield
