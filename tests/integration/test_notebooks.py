"""Every notebook runs from top to bottom and prints what is stored in it; what it claims it asserts itself."""

import json
import os
import subprocess
import sys

import pytest

from tests import xla
from tests.integration.command import ROOT
from tests.integration.notebooks import agrees, code_cells, stored_text

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
    flags = {"XLA_FLAGS": xla.flags(devices=1), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **flags})
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)
    for output, cell in zip(outputs, cells, strict=True):
        assert agrees(output["text"], stored_text(cell)), output["text"]
    pictures = [sum(output["output_type"] == "display_data" for output in cell["outputs"]) for cell in cells]
    assert [output["pictures"] for output in outputs] == pictures
    assert sum(pictures) >= 1


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("kl 0.4 nats", True),
        ("kl 0.5 nats", True),
        ("kl 0.6 nats", False),
        ("kl -0.4 nats", False),
        ("k3 0.4 nats", False),
        ("kl 0.4", False),
    ],
)
def test_outputs_agree_to_their_last_digit(printed, expected):
    assert agrees(printed, "kl 0.4 nats") is expected


def test_readme_and_landing_page_name_every_notebook():
    readme, landing = ((ROOT / name).read_text() for name in ("README.md", "docs/index.md"))
    assert all(f"(colab/{path.name})" in readme and f"`colab/{path.name}`" in landing for path in NOTEBOOKS)
