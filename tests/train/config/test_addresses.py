"""An address in an object store is never taken for a folder of this machine, wherever a path is named."""

import importlib
from pathlib import Path

import pytest

from kljax import __main__ as library
from train.config.errors import ConfigError
from train.config.load import load

LOCAL = {
    "compile_cache": "compile_cache={}",
    "data.reward": "data.reward={}/reward.py:score",
    "data.tokenizer": "data.tokenizer={}/tokenizer.py:make",
    "loss.function": "loss={{type: {}/loss.py:loss}}",
    "advantage.function": "advantage={}/advantage.py:advantage",
    "task": "task={}/task.py:make",
    "rollout.source.folder": "rollout.source={{type: openai, url: 'http://host', model: m, folder: '{}'}}",
    "rollout.source.api_key_file": "rollout.source={{type: openai, url: 'http://host', model: m, api_key_file: '{}'}}",
    "output": "output={}",
    "model.path": "model.path={}",
    "data.train": "data.train={}",
    "data.eval": "data.eval={}",
    "data.chat_template": "data.chat_template={}",
    "lora.path": "lora.path={}",
    "warm_start.checkpoint": "warm_start.checkpoint={}",
    "reference.path": "reference={{source: checkpoint, path: '{}'}}",
    "rollout.source.path": "rollout.source={{type: file, path: '{}'}}",
    "rollout.record": "rollout.record={}",
}
"""Fields that take a path of this machine alone, each with an override."""
ADDRESSES = ("gs://bucket/run", "s3://bucket/run", "s3:/bucket/run", "hf://org/name")
ARGUMENTS = {
    "train": [["{}/config.yaml"]],
    "train.eval": [["{}"], ["runs/a", "--json", "{}/a.json"]],
    "train.export": [["{}", "--to", "here"], ["runs/a", "--to", "{}"]],
    "train.import": [["{}/a.gguf", "--to", "here"], ["a.gguf", "--to", "{}"]],
    "train.plan": [["smoke", "--topology", "v5p:1", flag, "{}"] for flag in ("--json", "--markdown", "--keep")],
    "train.real": [["--show", "{}"]],
    "train.report": [["{}"], ["runs/a", "{}"], ["runs/a", "--output", "{}"]],
    "audit": [[flag, "{}"] for flag in ("--out", "--logits", "--ref-logits", "--batch", "--mask", "--tokens")],
    "parity": [["{}"], ["a.npz", "--html", "{}"]],
}
"""Arguments of the commands that name files and folders."""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("field", LOCAL)
def test_field_names_an_address_is_an_error(field: str, address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("smoke", [LOCAL[field].format(address)])
    assert any(line.startswith(f"{field}: ") and address in line for line in caught.value.problems)


@pytest.mark.parametrize("address", ADDRESSES[:2])
@pytest.mark.parametrize(
    ("command", "arguments"), [(name, arguments) for name, lists in ARGUMENTS.items() for arguments in lists]
)
def test_argument_names_an_address_is_an_error(
    command: str, arguments: list[str], address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [text.format(address) for text in arguments]
    try:
        if command in ("audit", "parity"):
            code = library.main([command, *filled])
        else:
            module = f"{command}.__main__" if command in ("train", "train.plan", "train.report") else command
            code = importlib.import_module(module).main(filled)
    except SystemExit as ended:
        code = ended.code
    shown = capsys.readouterr().err
    assert code == 2
    assert "an address" in shown
    assert address in shown
    assert "Traceback" not in shown
    assert not list(tmp_path.iterdir())


def test_name_with_a_colon_is_a_path() -> None:
    assert load("smoke", ["output=./s3:/runs"]).config.output == "./s3:/runs"
