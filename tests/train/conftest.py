"""Shared by the tests of the trainer."""

import pytest


@pytest.fixture
def write(tmp_path):
    """Write a config file and return its path."""

    def _write(text="steps: 3\n", name="config.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write
