"""Tokenizers of GGUF files: the golden tokenizers come back, and what contradicts itself is an error."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tests.real.texts import texts
from tests.train.weights.gguf.maker import GOLDENS, TOKENIZER, write_golden
from train.data.tasks import Example
from train.data.tokenizers.files import load_folder
from train.weights.gguf import import_gguf
from train.weights.gguf.header import Header
from train.weights.gguf.tokenizer import SPLITS, read_vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


def golden_keys(name: str) -> dict:
    """Writes a golden tokenizer in the keys of a file."""
    folder = GOLDENS / "tokenizers" / name
    state = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    numbers = dict(state["model"]["vocab"])
    types = {text: BYTE if text in BYTES else NORMAL for text in numbers}
    for token in state["added_tokens"]:
        numbers[token["content"]] = token["id"]
        types[token["content"]] = CONTROL if token["special"] else USER_DEFINED
    if "unk_token" in config:
        types[config["unk_token"]] = UNKNOWN
    tokens = sorted(numbers, key=numbers.__getitem__)
    keys = {
        "ggml.tokens": tokens,
        "ggml.token_type": np.array([types[text] for text in tokens]),
        **{f"ggml.{key}": numbers[config[f"{role}_token"]] for role, key in KEYS.items() if f"{role}_token" in config},
        "chat_template": (folder / "chat_template.jinja").read_text(),
    }
    if name == "gemma":
        rank = {"".join(pair): -number for number, pair in enumerate(state["model"]["merges"])}
        scores = np.array([rank.get(text, -1e6) for text in tokens], np.float32)
        keys |= {"ggml.model": "llama", "ggml.scores": scores}
    else:
        keys |= {"ggml.model": "gpt2", "ggml.pre": "qwen2"}
        keys["ggml.merges"] = [" ".join(pair) for pair in state["model"]["merges"]]
    return {f"tokenizer.{key}": value for key, value in keys.items()}


def vocabulary(keys: dict, arch: str = "llama"):
    types = np.asarray(keys.get("tokenizer.ggml.token_type", ()))
    return read_vocabulary(
        Header(Path("model.gguf"), {"general.architecture": arch, **keys, "tokenizer.ggml.token_type": types}, {})
    )


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
def test_golden_tokenizer_comes_back_from_keys(name):
    folder = GOLDENS / "tokenizers" / name
    expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    actual = vocabulary(golden_keys(name)).tokenizer
    lines = [entry["text"] for entry in json.loads((folder / "expected.json").read_text())["texts"]]
    for line in [*lines, *texts(200)]:
        ids = actual.encode(line, add_special_tokens=False).ids
        assert ids == expected.encode(line, add_special_tokens=False).ids, line
        assert actual.decode(ids) == expected.decode(ids)


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_bos_begins_a_prompt_if_the_file_says(name):
    keys = {**golden_keys(name), "tokenizer.ggml.add_bos_token": True}
    bos = keys["tokenizer.ggml.bos_token_id"]
    assert vocabulary(keys).tokenizer.encode("a").ids[0] == bos
    assert vocabulary({**keys, "tokenizer.ggml.add_bos_token": False}).tokenizer.encode("a").ids[0] != bos


def test_prompts_and_stops_come_from_the_file(tmp_path):
    folder = GOLDENS / "tokenizers" / "chatml"
    golden = load_folder(folder)
    keys = {**golden_keys("chatml"), "tokenizer.ggml.eot_token_id": 350}
    path = write_golden(tmp_path / "model.gguf", "qwen3", **listed(keys))
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.tokens: got 355 tokens, but the embeddings have 320 rows"):
        import_gguf(path, tmp_path / "folder")
    small = cut_to(keys, 320)
    import_gguf(write_golden(tmp_path / "small.gguf", "qwen3", **small), tmp_path / "folder")
    tokenizer = load_folder(tmp_path / "folder")
    text = golden.decode(golden.prompt_ids(Example("How many?", "", "")))
    assert tokenizer.decode(tokenizer.prompt_ids(Example("How many?", "", ""))) == text
    assert tokenizer.eos_ids == (small["tokenizer.ggml.eos_token_id"], small["tokenizer.ggml.eot_token_id"])


def listed(keys: dict) -> dict:
    return {**keys, "tokenizer.ggml.token_type": keys["tokenizer.ggml.token_type"].tolist()}


def cut_to(keys: dict, rows: int) -> dict:
    """Removes merged tokens until the vocabulary has so many rows."""
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"].tolist()
    merges = keys["tokenizer.ggml.merges"][: len(keys["tokenizer.ggml.merges"]) - (len(tokens) - rows)]
    merged = {merge.replace(" ", "") for merge in merges}
    pairs = [
        (text, kind)
        for text, kind in zip(tokens, types, strict=True)
        if kind != NORMAL or len(text) == 1 or text in merged
    ]
    numbers = {text: number for number, (text, _) in enumerate(pairs)}
    ids = {key: numbers[tokens[keys[key]]] for key in keys if key.endswith("_token_id")}
    return {
        **keys,
        **ids,
        "tokenizer.ggml.tokens": list(numbers),
        "tokenizer.ggml.token_type": [kind for _, kind in pairs],
        "tokenizer.ggml.merges": merges,
    }


def test_names_of_splits_decide_the_words():
    def words(pre: str, line: str) -> list[str]:
        made = vocabulary({**TOKENIZER, "tokenizer.ggml.pre": pre}).tokenizer
        return [word for word, _ in made.pre_tokenizer.pre_tokenize_str(line)]

    assert words("gpt-2", "a  1234") == ["a", "Ġ", "Ġ1234"]
    assert words("smollm", "a  1234") == ["a", "ĠĠ", "1", "2", "3", "4"]
    assert words("llama-bpe", "a  1234 I'M") == ["a", "Ġ", "Ġ", "123", "4", "ĠI", "'M"]
    assert words("qwen2", "12 b\n\n") == ["1", "2", "Ġb", "ĊĊ"]
    assert words("tekken", "camelCase") == ["camel", "Case"]
    assert {name for name in SPLITS if vocabulary({**TOKENIZER, "tokenizer.ggml.pre": name})} == set(SPLITS)


def test_words_in_the_vocabulary_are_not_merged():
    """Llama 3 and Mistral's Tekken have tokens that no merges reach."""
    keys = {**TOKENIZER, "tokenizer.ggml.merges": []}
    number = keys["tokenizer.ggml.tokens"].index("ab")
    assert vocabulary({**keys, "tokenizer.ggml.pre": "llama-bpe"}).tokenizer.encode("ab").ids == [number]
    assert len(vocabulary({**keys, "tokenizer.ggml.pre": "qwen2"}).tokenizer.encode("ab").ids) == 2


def test_fillers_of_the_converter_are_no_tokens():
    tokens = [*TOKENIZER["tokenizer.ggml.tokens"], "[PAD29]", "<unused>"]
    types = np.array([*TOKENIZER["tokenizer.ggml.token_type"], UNUSED, UNUSED])
    made = vocabulary({**TOKENIZER, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}).tokenizer
    assert made.token_to_id("[PAD29]") is None
    assert made.token_to_id("<unused>") == 30


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ggml.model", "t5", r"ggml\.model: got 't5', expected gpt2 or llama"),
        ("ggml.model", 3, r"ggml\.model: got int, expected str"),
        ("ggml.pre", "chatglm-bpe", r"ggml\.pre: got 'chatglm-bpe', expected one of gpt-2, smollm"),
        ("ggml.tokens", ["a", "a"], r"ggml\.tokens: duplicate token"),
        ("ggml.tokens", ["a" * 100_000], r"ggml\.tokens: got 100,000 characters, which is no token"),
        ("ggml.token_type", np.array([1]), r"ggml\.token_type: got 1 types of 29 tokens"),
        ("ggml.token_type", np.array([*[1] * 28, 99]), r"ggml\.token_type: got 99, expected types from 0 to 6"),
        ("ggml.token_type", np.array([*[1] * 28, -1]), r"ggml\.token_type: got -1, expected types from 0 to 6"),
        ("ggml.token_type", np.array([*[1.0] * 28, 1.5]), r"ggml\.token_type: got 1\.5, expected types from 0 to 6"),
        ("ggml.merges", ["abc"], r"ggml\.merges: got an entry without exactly one space"),
        ("ggml.merges", ["a z1"], r"ggml\.merges: the tokenizer cannot be made of them"),
        ("ggml.eos_token_id", 99, r"ggml\.eos_token_id: got 99, but there are 29 tokens"),
        ("ggml.add_bos_token", 1, r"ggml\.add_bos_token: got int, expected bool"),
        ("ggml.precompiled_charsmap", np.zeros(3, np.uint8), r"ggml\.precompiled_charsmap: not understood"),
        ("chat_template", 1, r"tokenizer\.chat_template: got no text"),
    ],
)
def test_tokenizer_key_not_understood_is_an_error(key, value, message):
    with pytest.raises(ValueError, match=message):
        vocabulary({**TOKENIZER, f"tokenizer.{key}": value})


@pytest.mark.parametrize("key", ["model", "pre", "tokens", "merges"])
def test_missing_tokenizer_key_is_named(key):
    keys = {name: value for name, value in TOKENIZER.items() if name != f"tokenizer.ggml.{key}"}
    with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.{key}: missing"):
        vocabulary(keys)
