"""Tables of recorded rollouts: columns of any shape come back as they were, and texts of tokens join to the text."""

import json

import numpy as np
import pytest
from pyarrow import parquet

from train.data.tokenizers import ByteTokenizer
from train.rollouts.recorded.files import open_files
from train.rollouts.recorded.table import TokenRows, TokenTexts, write_table
from train.run.recorder import token_texts
from train.sequences.token_fields import TOKEN_FIELDS, TokenField

PROMPTS, COMPLETIONS = (2, 3, 0), (3, 1, 0)
WIDTH = 7


@pytest.fixture
def declared(monkeypatch):
    """A field with two trailing axes that the tokens of prompts have too, as the experts of each layer would be."""
    monkeypatch.setitem(TOKEN_FIELDS, "routes", TokenField(np.int32, axes=("layers", "choices"), prompts=True))


def rows_of(rng: np.random.Generator) -> TokenRows:
    column = np.arange(WIDTH)
    completion_mask = np.array([(column >= 3) & (column < 3 + count) for count in COMPLETIONS])
    prompt_mask = np.array([(column < 3) & (column >= 3 - count) for count in PROMPTS])
    kept_ids = rng.integers(0, 250, (3, WIDTH, 4))
    kept_ids[rng.random(kept_ids.shape) < 0.4] = -1
    arrays = {
        "tokens": rng.integers(0, 250, (3, WIDTH)).astype(np.int32),
        "token_mask": prompt_mask | completion_mask,
        "completion_mask": completion_mask,
        "entropy": rng.normal(size=(3, WIDTH)).astype(np.float32),
        "kept_mask": rng.random((3, WIDTH)) < 0.5,
        "kept_ids": kept_ids.astype(np.int32),
        "routes": rng.integers(0, 9, (3, WIDTH, 2, 3)).astype(np.int32),
    }
    return TokenRows([{"row": row, "reward": row / 2, "rewards": {"correct": 1.0}} for row in range(3)], arrays)


def test_columns_of_every_shape_come_back(declared, tmp_path):
    rows, path = rows_of(np.random.default_rng(0)), tmp_path / "00000001.parquet"
    size = write_table(path, rows, TokenTexts(ByteTokenizer().token_bytes()), {"step": 1})
    assert size == path.stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    table = parquet.read_table(path)
    assert json.loads(table.schema.metadata[b"kljax"]) == {"format": 1, "step": 1}
    read, arrays = table.to_pylist(), rows.arrays
    for index, record in enumerate(read):
        drawn, real = arrays["completion_mask"][index], arrays["token_mask"][index]
        assert record["row"] == index
        assert record["rewards"] == {"correct": 1.0}
        assert record["prompt_ids"] + record["completion_ids"] == arrays["tokens"][index][real].tolist()
        for name in ("entropy", "kept_mask"):
            assert record[name] == arrays[name][index][drawn].tolist()
        assert record["routes"] == arrays["routes"][index][real].tolist()
        assert record["kept_ids"] == [ids[ids >= 0].tolist() for ids in arrays["kept_ids"][index][drawn]]


def test_token_texts_join_with_special_tokens():
    tokenizer = ByteTokenizer()
    texts = token_texts(tokenizer)
    ids = np.array([tokenizer.bos_id, *tokenizer.encode("a€b"), tokenizer.eos_id])
    assert texts.of(ids) == ["<bos>", "a", "", "", "€", "b", "<eos>"]
    assert "".join(texts.of(ids)) == tokenizer.decode_all(ids.tolist())
    assert texts.of(ids[1:4]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert texts.of(ids[:0]) == []


def test_table_is_a_source_of_recorded_completions(tmp_path):
    path = tmp_path / "00000001.parquet"
    write_table(path, rows_of(np.random.default_rng(1)), TokenTexts(ByteTokenizer().token_bytes()), {})
    (file,) = open_files(path)
    assert [record["reward"] for _, _, record in file] == [0.0, 0.5, 1.0]


def test_ids_beyond_the_tokenizer_have_no_text():
    assert TokenTexts([b"a", b"\xc3", b"\xa9"]).of(np.array([0, 3, 1, 2, 7])) == ["a", "", "", "é", ""]
