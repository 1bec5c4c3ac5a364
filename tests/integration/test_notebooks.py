"""Every notebook runs from top to bottom and prints what is stored in it; what it claims it asserts itself."""

import json
import os
import subprocess
import sys

import pytest

from tests.integration.command import ROOT
from tests.integration.notebooks import code_cells, stored_text

NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
MOST_CELLS = 14


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_prints_its_stored_output(path):
    notebook = json.loads(path.read_text())
    assert len(notebook["cells"]) <= MOST_CELLS
    cells = code_cells(notebook)
    assert any("assert " in "".join(cell["source"]) for cell in cells)
    command = [sys.executable, "-m", "tests.integration.notebooks", str(path)]
    # One device, as on the machine of a reader. Programs run for milliseconds, so they compile without optimizations.
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)
    assert [output["text"] for output in outputs] == [stored_text(cell) for cell in cells]
    pictures = [sum(output["output_type"] == "display_data" for output in cell["outputs"]) for cell in cells]
    assert [output["pictures"] for output in outputs] == pictures
    assert sum(pictures) >= 1


def test_readme_links_to_every_notebook():
    readme = (ROOT / "README.md").read_text()
    assert all(f"(colab/{path.name})" in readme for path in NOTEBOOKS)
