"""`python -m train.import`, and `model.path: FILE.gguf`: a tiny file is imported, trained on and exported."""

import importlib
import json
import shutil
import subprocess
import sys

import pytest

from tests.train.weights.gguf.maker import write_golden
from train.config.load import load
from train.run.run import run
from train.weights.huggingface.config import decoder_config

CONFIG = """
steps: 1
output: {output}
model: {{path: {path}}}
data: {{max_operand: 9, max_prompt_length: 16, max_completion_length: 4}}
rollout: {{prompts_per_step: 2, samples_per_prompt: 2}}
eval: {{every: 1, prompts: 2, batch_size: 2}}
checkpoint: {{every: 1}}
"""
LETTERS = [*"0123456789+-=", *"abcdefghijklmn", "ab", "<end>"]
TOKENS = {"tokenizer.ggml.tokens": LETTERS, "tokenizer.ggml.token_type": [1] * 28 + [3]}


@pytest.fixture
def command(capsys):
    """`command(*arguments)`: the exit code and what was printed."""
    # A keyword cannot be imported by name; another test may have loaded the module.
    main = importlib.import_module("train.import").main

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


def test_command_writes_a_folder_and_says_so(command, tmp_path):
    path, folder = write_golden(tmp_path / "model.gguf", "qwen2"), tmp_path / "folder"
    code, printed = command(path, "--to", folder, "--dtype", "bfloat16")
    assert (code, printed) == (0, f"{folder}: qwen2 with 3 layers, bfloat16, of {path}\n")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    code, printed = command(path, "--to", folder)
    assert code == 2
    assert printed.startswith(f"error: --to: {folder} is there already")


def test_command_names_the_problem_of_a_file(command, tmp_path):
    path = write_golden(tmp_path / "model.gguf", "qwen2")
    path.write_bytes(path.read_bytes()[:-1000])
    code, printed = command(path, "--to", tmp_path / "folder")
    assert code == 2
    assert printed.startswith(f"error: FILE.gguf: {path}: the tensor ")
    assert not (tmp_path / "folder").exists()
    assert command(tmp_path / "none.gguf", "--to", tmp_path / "folder")[0] == 2


def test_module_runs_in_spite_of_its_name():
    """`import` is a keyword, which runpy does not mind."""
    printed = subprocess.run(
        [sys.executable, "-m", "train.import", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "python -m train.import SmolLM2" in printed


@pytest.mark.slow
def test_run_starts_from_a_gguf_file(tmp_path, capfd):
    path = write_golden(tmp_path / "model.gguf", "qwen2", **TOKENS)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(output=tmp_path / "runs", path=path))
    assert run(load(config)) == 0
    folder = tmp_path / "model.hf"
    assert decoder_config(folder).layers == 3
    root = next((tmp_path / "runs").iterdir())
    assert str(folder) in (root / "config.yaml").read_text()
    assert json.loads((root / "summary.json").read_text())
    # The folder is used again, and refused once the file beside it is another one.
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    path.write_bytes(path.read_bytes() + bytes(32))
    with pytest.raises(Exception, match=r"model\.path: .*model\.hf was made of another file than .*; remove"):
        run(load(config))
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(Exception, match=r"model\.hf is there, and was not made of"):
        run(load(config))
