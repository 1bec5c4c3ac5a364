"""Shared by the tests of the trainer. Traces are counted anew: programs of two tests may have one definition."""

from collections.abc import Iterator

import pytest

from train.rl.tracing import forget_traces


@pytest.fixture(autouse=True)
def _forget_traces() -> Iterator[None]:
    forget_traces()
    yield
    forget_traces()


@pytest.fixture
def write(tmp_path):
    """Write a config file and return its path."""

    def _write(text="steps: 3\n", name="config.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write
