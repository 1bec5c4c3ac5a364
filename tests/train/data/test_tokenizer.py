from hypothesis import given
from hypothesis import strategies as st

from train.data.tokenizers import UNKNOWN, ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_decode_inverts_encode(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text())
def test_ids_are_the_utf8_bytes(text):
    assert bytes(TOKENIZER.encode(text)) == text.encode("utf-8")


def test_special_ids_are_distinct_and_inside_the_vocabulary():
    special = [TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id]
    assert special == [256, 257, 258]
    assert TOKENIZER.vocab_size == 264
    assert TOKENIZER.vocab_size % 8 == 0


def test_eos_is_omitted_and_other_special_ids_show():
    assert TOKENIZER.decode([56, 53, TOKENIZER.eos_id]) == "85"
    for token in (TOKENIZER.bos_id, TOKENIZER.pad_id, TOKENIZER.vocab_size - 1):
        assert TOKENIZER.decode([56, token, 53]) == f"8{UNKNOWN}5"


def test_decode_all_names_every_special_id():
    ids = [TOKENIZER.bos_id, 56, TOKENIZER.eos_id, TOKENIZER.pad_id, TOKENIZER.vocab_size - 1]
    assert TOKENIZER.decode_all(ids) == f"<bos>8<eos><pad>{UNKNOWN}"


def test_invalid_bytes_and_surrogates_do_not_raise():
    assert TOKENIZER.decode([0xC3]) == UNKNOWN
    assert TOKENIZER.decode([0xC3, TOKENIZER.bos_id, 0xA9]) == UNKNOWN * 3
    assert TOKENIZER.decode(TOKENIZER.encode("\ud800!")) == "?!"


def test_decode_takes_any_iterable_of_integers():
    assert TOKENIZER.decode(iter(TOKENIZER.encode("é"))) == "é"
