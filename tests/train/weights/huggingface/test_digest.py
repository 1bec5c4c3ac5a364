"""A folder's digest follows its weights and config.json, and nothing else."""

import re
import shutil
from pathlib import Path

import pytest

from train.weights.huggingface import folder_digest

GOLDENS = Path(__file__).parents[3] / "goldens" / "models"


def test_digest_covers_weights_and_config(tmp_path):
    copy = shutil.copytree(GOLDENS / "qwen3", tmp_path / "copy")
    before = folder_digest(GOLDENS / "qwen3")
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", before)
    assert folder_digest(copy) == before
    (copy / "README.md").write_text("of no weight depends on this")
    (copy / "tokenizer.json").unlink()
    assert folder_digest(copy) == before


@pytest.mark.parametrize("name", ["config.json", "model-00003-of-00004.safetensors"])
def test_one_byte_changes_the_digest_again(tmp_path, name):
    copy = shutil.copytree(GOLDENS / "qwen3", tmp_path / "copy")
    before = folder_digest(copy)
    path = copy / name
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    assert folder_digest(copy) != before


def test_folder_without_config_has_no_digest(tmp_path):
    shutil.copy(GOLDENS / "qwen2" / "model.safetensors", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected config\.json"):
        folder_digest(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        folder_digest(tmp_path / "nowhere")
