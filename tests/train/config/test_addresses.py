"""An address in an object store is never taken for a folder of this machine, wherever a path is named."""

import importlib
from pathlib import Path

import pytest

from kljax import __main__ as library
from train.config import storage
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
}
"""Fields that take a path of this machine alone, each with an override."""
STORED = {
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
"""Fields that take an address of a store, too."""
ADDRESSES = ("gs://bucket/run", "s3://bucket/run", "s3:/bucket/run", "hf://org/name")
ARGUMENTS = {
    "train": [["{}/config.yaml"]],
    "train.import": [["{}/a.gguf", "--to", "here"], ["a.gguf", "--to", "{}"]],
    "train.plan": [["smoke", "--topology", "v5p:1", flag, "{}"] for flag in ("--json", "--markdown", "--keep")],
    "audit": [[flag, "{}"] for flag in ("--out", "--logits", "--ref-logits", "--batch", "--mask", "--tokens")],
    "parity": [["{}"], ["a.npz", "--html", "{}"]],
}
"""Arguments of the commands that name files and folders of this machine."""
STORED_ARGUMENTS = {
    "train.eval": [["{}"], ["runs/a", "--json", "{}/a.json"]],
    "train.export": [["{}", "--to", "here"], ["runs/a", "--to", "{}"]],
    "train.real": [["--show", "{}"]],
    "train.serve": [["{}"]],
    "train.report": [["{}"], ["runs/a", "{}"], ["runs/a", "--output", "{}"]],
}
"""Those that take an address of a store, too."""
PROBLEMS = {
    "gs://bucket/run": "gs:// needs the package gcsfs; run pip install 'kljax[train,gcs]'",
    "s3://bucket/run": "s3:// needs the package s3fs; run pip install 'kljax[train,s3]'",
    "s3:/bucket/run": "one slash; expected two, as s3://bucket/run",
    "s3://bucket": "a bucket alone; expected s3://bucket/NAME",
    "s3:///run": "no bucket; expected s3://BUCKET/NAME",
    "s3://bucket/a*": "a character of ? * [ ]",
    "hf://org/name": "an address of hf://; expected a path, or an address of s3:// or gs://",
}
"""Addresses that cannot be used, where the packages of the stores are missing."""


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


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the packages of the stores, where they are installed."""
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("address", PROBLEMS)
@pytest.mark.parametrize("field", STORED)
def test_field_says_why_an_address_cannot_be_used(field: str, address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("smoke", [STORED[field].format(address)])
    start = f"{field}: got {address!r} ({PROBLEMS[address]}"
    assert any(line.startswith(start) for line in caught.value.problems), caught.value.problems


def each(commands: dict[str, list[list[str]]]) -> list[tuple[str, list[str]]]:
    return [(name, arguments) for name, lists in commands.items() for arguments in lists]


@pytest.mark.parametrize("address", ADDRESSES[:2])
@pytest.mark.parametrize("call", [*each(ARGUMENTS), *each(STORED_ARGUMENTS)])
def test_argument_names_an_address_is_an_error(
    call: tuple[str, list[str]],
    address: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    command, arguments = call
    is_stored = command in STORED_ARGUMENTS
    if is_stored:
        request.getfixturevalue("without_packages")
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
    assert (PROBLEMS[address] if is_stored else "an address") in shown
    assert address in shown
    assert "Traceback" not in shown
    assert not list(tmp_path.iterdir())


def test_name_with_a_colon_is_a_path() -> None:
    assert load("smoke", ["output=./s3:/runs"]).config.output == "./s3:/runs"
