"""The embedding of the padding token of a folder: frozen on request, with a warning where prompts have the token."""

import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest

from tests.goldens.presets.batch import MODEL
from train.config.errors import UserError
from train.config.load import parse
from train.config.schema import Config
from train.run.setup import warn_of_pad_in_prompts
from train.weights.model import make_model

TOKENIZER: Any = types.SimpleNamespace(vocab_size=32)


def config_of(**model: Any) -> Config:
    return parse({"steps": 1, "task": "gsm8k", "model": model, **FILES})[0]


FILES = {"data": {"train": __file__, "eval": __file__}}


def folder_without_pad(tmp_path: Path) -> str:
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model/config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in raw.items() if key != "pad_token_id"}))
    return str(path.parent)


def prompts_of(*ids: list[int]) -> Any:
    return types.SimpleNamespace(examples=[types.SimpleNamespace(prompt_ids=row) for row in ids])


def test_pad_embedding_is_constant_on_request() -> None:
    for freeze, token in ((True, 0), (False, None)):
        decoder = make_model(config_of(path=str(MODEL), freeze_pad_embedding=freeze), TOKENIZER)
        assert decoder.config.constant_embedding == token


def test_request_without_pad_token_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"freeze_pad_embedding: got true, but without model.path"):
        make_model(config_of(freeze_pad_embedding=True), TOKENIZER)
    with pytest.raises(UserError, match=r"freeze_pad_embedding: got true, but .*config.json has no pad_token_id"):
        make_model(config_of(path=folder_without_pad(tmp_path), freeze_pad_embedding=True), TOKENIZER)


def test_prompts_with_the_pad_token_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = prompts_of([3, 0, 4], [5, 6])
    warn_of_pad_in_prompts(config_of(path=str(MODEL)), prompts)
    assert "1 of 2 prompts have token 0" in capsys.readouterr().err
    for decided in (False, True):
        warn_of_pad_in_prompts(config_of(path=str(MODEL), freeze_pad_embedding=decided), prompts)
    warn_of_pad_in_prompts(config_of(path=str(MODEL)), prompts_of([3, 4]))
    warn_of_pad_in_prompts(config_of(path=folder_without_pad(tmp_path)), prompts)
    assert not capsys.readouterr().err
