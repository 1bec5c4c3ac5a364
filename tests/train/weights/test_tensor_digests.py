"""A flipped bit in an exported folder is noticed when it is loaded, with its file and tensor."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from train.config.errors import UserError
from train.weights.tensor_digests import FILE_NAME, HEADER, check_tensors, write_tensor_digests

TENSORS = {"a.weight": np.arange(6, dtype=np.float32), "b.weight": np.ones((3, 5), np.float16)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model-1.safetensors")
    save_file({"c.weight": np.zeros(4, np.float32)}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    write_tensor_digests(tmp_path)
    return tmp_path


def test_undamaged_folders_pass_with_or_without_digests(folder):
    check_tensors(folder)
    (folder / FILE_NAME).unlink()
    check_tensors(folder)


def test_every_flipped_bit_is_named(folder, tmp_path):
    path = folder / "model-1.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    named = set()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1 << position % 8]) + content[position + 1 :])
        with pytest.raises(ValueError, match=r"model-1\.safetensors is damaged: got other bytes than") as caught:
            check_tensors(folder)
        tensor = str(caught.value).partition("exported in ")[2].partition(";")[0]
        named |= {tensor} if position >= header else set()
        assert position >= header or HEADER in tensor
    assert named == set(TENSORS)


@pytest.mark.parametrize("size", [0, 5, 60, 150])
def test_a_cut_file_is_named(folder, size):
    path = folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model-1\.safetensors is damaged"):
        check_tensors(folder)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_text_is_named(folder, name):
    (folder / name).write_text('{"lora_alpha": 16}')
    write_tensor_digests(folder)
    check_tensors(folder)
    (folder / name).write_text('{"lora_alpha": 8}')
    with pytest.raises(ValueError, match=rf"{name} is damaged: .* delete {FILE_NAME} if the change is wanted"):
        check_tensors(folder)


def test_missing_file_and_damaged_digests_are_named(folder):
    copy = Path(shutil.copytree(folder, folder / "copy"))
    (copy / "model-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-2\.safetensors"):
        check_tensors(copy)
    text = (folder / FILE_NAME).read_text()
    (folder / FILE_NAME).write_text(text.replace("a.weight", "a.weighs"))
    with pytest.raises(UserError, match=rf"{FILE_NAME} is damaged"):
        check_tensors(folder)
