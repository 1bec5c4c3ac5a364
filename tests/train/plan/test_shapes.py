"""The decoder of a config whose Hugging Face folder is elsewhere."""

import json
import pathlib

import pytest

from tests import stores
from tests.tiny import config_of
from tests.train.weights.parameters import parameter_count
from train.config.errors import UserError
from train.config.load import load, parse
from train.data.tokenizers import load_tokenizer
from train.plan.shapes import PUBLISHED, folder_config, planned_model
from train.weights.huggingface.config import decoder_config
from train.weights.model import make_model

store = stores.store
ROOT = pathlib.Path(__file__).parents[3]
QWEN3 = ROOT / "tests" / "goldens" / "models" / "qwen3"
# Billions of parameters, as the cards of the models say.
BILLIONS = {
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.7,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.6,
    "Llama-3.2-1B": 1.24,
    "Llama-3.2-3B": 3.21,
}


def test_published_shapes_have_the_parameters_of_their_models():
    assert BILLIONS.keys() == PUBLISHED.keys()
    for name, billions in BILLIONS.items():
        assert parameter_count(decoder_config(PUBLISHED[name])) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("path", ["checkpoints/Qwen3-8B", "Qwen3-8B/", "/data/qwen3-8b-base", "Qwen3-8B-Instruct"])
def test_a_folder_is_known_by_its_name(path):
    assert folder_config(path, "model.path") is PUBLISHED["Qwen3-8B"]


def test_unknown_folder_error_names_the_needed_file():
    with pytest.raises(
        UserError, match=r"model\.path: there is no .*other/config\.json, .* copy config\.json of the model"
    ):
        folder_config("other", "model.path")


def test_a_config_json_counts_more_than_a_name(tmp_path):
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 3}))
    assert folder_config(folder, "model.path") == {"hidden_size": 3}
    (folder / "config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"config\.json: got list, expected a mapping"):
        folder_config(folder, "model.path")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"model\.path: "):
        folder_config(folder, "model.path")


def test_config_json_is_read_from_a_store(store):
    (store / "Qwen3-8B").mkdir()
    (store / "Qwen3-8B/config.json").write_text(json.dumps({"hidden_size": 3}))
    assert folder_config("s3://bucket/Qwen3-8B", "model.path") == {"hidden_size": 3}
    with pytest.raises(UserError, match=r"model\.path: there is no s3://bucket/other/config\.json, "):
        folder_config("s3://bucket/other", "model.path")


def test_local_folder_gives_the_decoder_of_a_run():
    config, _ = parse({"steps": 1, "model": {"path": str(QWEN3)}})
    decoder, ids = planned_model(config)
    tokenizer = load_tokenizer(config)
    assert decoder == make_model(config, tokenizer)
    assert ids.vocab_size == decoder.config.vocab_size
    assert ids.eos_ids


def test_a_config_without_a_folder_keeps_its_tokenizer():
    decoder, tokenizer = planned_model(config_of())
    assert tokenizer.vocab_size == decoder.config.vocab_size
    assert tokenizer.encode("a") == [97]


@pytest.mark.parametrize("name", ["gsm8k_qwen3_8b_v5p64", "math_llama3_8b_h100x8"])
def test_the_recipes_of_8b_models_are_known(name):
    decoder, ids = planned_model(load(ROOT / "configs" / f"{name}.yaml").config)
    assert 8.0e9 < parameter_count(decoder.config) < 8.3e9
    assert all(0 < token < ids.vocab_size for token in ids.eos_ids)


def test_ids_without_a_tokenizer_have_one_byte_each():
    _, ids = planned_model(load(ROOT / "configs" / "gsm8k_qwen3_8b_v5p64.yaml").config)
    assert len(ids.token_bytes()) == 151_936
    for call in (lambda: ids.encode("a"), lambda: ids.decode([1])):
        with pytest.raises(NotImplementedError):
            call()
