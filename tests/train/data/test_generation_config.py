"""Warnings about penalties in the `generation_config.json` of a model folder, which no sampler of a run uses."""

import json
import shutil
from pathlib import Path

import pytest

from tests import tiny
from train.config.errors import UserError
from train.config.load import parse
from train.data.tokenizers.generation_config import warn_of_generation_config
from train.run.setup import make_context

NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0,
    "no_repeat_ngram_size": 0,
    "suppress_tokens": [],
    "typical_p": 1,
    "bad_words_ids": None,
    "temperature": 0.6,
    "top_k": 20,
    "eos_token_id": [1, 2],
}


def test_penalties_are_named_with_their_values(tmp_path, capsys):
    (tmp_path / "generation_config.json").write_text(
        json.dumps(NEUTRAL | {"repetition_penalty": 1.05, "no_repeat_ngram_size": 3, "suppress_tokens": [7]})
    )
    warn_of_generation_config(tmp_path)
    changed = "repetition_penalty 1.05, no_repeat_ngram_size 3, suppress_tokens [7]"
    assert capsys.readouterr().err.startswith(
        f"warning: model.path: generation_config.json of {tmp_path} has {changed}, which this run does not use: "
    )


def test_run_of_a_folder_reads_its_generation_config(tmp_path, capsys):
    folder = Path(__file__).parents[2] / "goldens" / "models" / "qwen3"
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(NEUTRAL | {"repetition_penalty": 1.3}))
    raw = {**tiny.RAW, "model": {"path": str(tmp_path / "model")}, "warm_start": {"steps": 0}}
    make_context(parse(raw | {"data": {"max_prompt_length": 64, "max_completion_length": 4, "max_operand": 9}})[0])
    assert "generation_config.json of" in (text := capsys.readouterr().err)
    assert "has repetition_penalty 1.3, which this run does not use" in text


@pytest.mark.parametrize("content", [NEUTRAL, {}, None])
def test_neutral_fields_and_options_of_a_config_are_fine(tmp_path, content, capsys):
    """Temperature and cuts are fields of a config: other values there are a choice."""
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    warn_of_generation_config(tmp_path)
    assert capsys.readouterr().err == ""


def test_damaged_generation_config_is_an_error(tmp_path):
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"generation_config\.json holds list, expected a JSON object"):
        warn_of_generation_config(tmp_path)
