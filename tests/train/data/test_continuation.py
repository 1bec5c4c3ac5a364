"""Completions are encoded and decoded as they go on after their prompt, with vocabularies of every kind."""

import functools
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.train.data.tokenizers_of_kinds import KINDS, Characters, word_pieces
from train.data.prompts import decode_completions
from train.data.tasks.task import Example
from train.data.tokenizers import UNKNOWN, ByteTokenizer, decode_continuation, encode_continuation
from train.data.tokenizers.folder import FolderTokenizer
from train.rollouts.recorded.record import parse_row
from train.run.recorder import token_texts

PARTS = (
    *(" ", "    ", "\n", "\n\n", "\t", "\u00a0", "\u3000", "a", "Tom", "has", " apples", "def f(x):\n    return x"),
    *("42", " 7", "=", ".", ",", "(", "'s", "é", "数学", "🙂", "\u0301", UNKNOWN, "##s", "<turn>", "<s>"),
)
TEXTS = st.lists(st.sampled_from(PARTS), max_size=6).map("".join) | st.text(max_size=8)
make = functools.cache(lambda kind: KINDS[kind]())


def is_spelled(prompt: str, text: str) -> bool:
    """Whether the tokenizers distinguish the text from others.

    NFC changes some texts, and an end does not show. Behind a special token, some tokenizers write the same ids with a
    space as without one. U+FFFD in a prompt looks like a part of a character.
    """
    same = ("<|im_end|>", "<|endoftext|>", "<eos>", "</s>", "<turn> ", "<s> ")
    return (
        UNKNOWN not in prompt
        and unicodedata.is_normalized("NFC", prompt + text)
        and not any(part in prompt + text for part in same)
    )


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXTS, text=TEXTS)
@example(prompt="x=\n", text="42")
@example(prompt="def f():\n", text="    return 42")
@example(prompt="x=", text="=")
@example(prompt="x", text="")
@example(prompt="a<turn>", text="42")
@example(prompt=".", text="    0")
@example(prompt="数学", text="学")
@example(prompt="", text="42")
def test_continuation_decodes_to_its_text(kind, prompt, text):
    assume(is_spelled(prompt, text))
    tokenizer = make(kind)
    head = tokenizer.prompt_ids(Example(prompt, "", ""))
    assume(head)
    ids = encode_continuation(tokenizer, head, text)
    assert decode_continuation(tokenizer, head, ids) == text
    if prompt:
        assert tokenizer.decode_all([*head, *ids]) == tokenizer.decode_all(head) + text
    assert decode_completions(*columns(head, ids), tokenizer) == [text]


def columns(head, ids):
    """A padded row of a prompt and its completion."""
    tokens = np.array([[0, *head, *ids, 0]])
    is_completion = np.array([[False] * (len(head) + 1) + [True] * len(ids) + [False]])
    is_token = np.array([[False] + [True] * (len(head) + len(ids)) + [False]])
    return tokens, is_token, is_completion


@pytest.mark.parametrize("kind", KINDS)
@given(head=st.lists(st.integers(0, 400), min_size=1, max_size=6), ids=st.lists(st.integers(0, 400), max_size=8))
@example(head=[288], ids=[236, 155, 182, 235])  # pieces: a whole character in bytes, and the first of another
def test_sampled_ids_show_the_bytes_of_their_tokens(kind, head, ids):
    tokenizer = make(kind)
    pieces = [*tokenizer.token_bytes(), *[UNKNOWN.encode()] * 400]
    expected = b"".join(pieces[token] for token in ids).decode("utf-8", errors="replace")
    # A space behind a special token may be one that the tokenizer writes there.
    assert decode_continuation(tokenizer, head, ids).replace(" ", "") == expected.replace(" ", "")


PIECES = ["</s>", "▁", "x", "=", "4", "2", "\n", "42"]


def small_pieces() -> FolderTokenizer:
    """A vocabulary of eight pieces, as of Llama 2, Mistral, TinyLlama and Phi-3."""
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(PIECES)}, [("4", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return FolderTokenizer(tokenizer, special={}, eos_ids=[0])


def parse(record, tokenizer):
    """Parses a row of a recording."""
    return parse_row(
        record, SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(config=SimpleNamespace(vocab_size=512)))
    )


def test_recorded_text_has_the_ids_of_a_solution():
    tokenizer = small_pieces()
    row = parse({"prompt": "x=\n", "completion": "42", "reward": 1.0}, tokenizer)
    assert row.completion_ids == tokenizer.solution_ids(Example("x=\n", "", "42")) == [7, 0]
    assert tokenizer.decode_all(row.prompt_ids + row.completion_ids) == "x=\n42</s>"


def test_completion_keeps_all_spaces_at_its_beginning():
    tokenizer = small_pieces()
    head = tokenizer.prompt_ids(Example("x=\n", "", ""))
    assert decode_continuation(tokenizer, head, [1, 1, 1, 1, 2]) == "    x"
    assert decode_completions(*columns(head, [1, 1, 1, 1, 2, 0]), tokenizer) == ["    x"]
    row = parse({"prompt_ids": head, "completion_ids": [1, 1, 1, 1, 2], "reward": 1.0}, tokenizer)
    assert row.text == "    x"


@pytest.mark.parametrize("kind", KINDS)
def test_recording_of_texts_has_ids_of_its_prompt(kind):
    tokenizer = make(kind)
    for text in ("42", " 42", "    return x\n", "", "数学"):
        row = parse({"prompt": "def f(x):\n", "completion": text, "reward": 1.0}, tokenizer)
        assert row.completion_ids[-1] == tokenizer.eos_ids[0]
        by_ids = {"prompt_ids": row.prompt_ids, "reward": 1.0}
        assert parse({**by_ids, "completion": text}, tokenizer).completion_ids == row.completion_ids
        assert parse({**by_ids, "completion_ids": row.completion_ids}, tokenizer).text == text
        assert (
            parse({"prompt": "def f(x):\n", "completion": text, "finished": False}, tokenizer).completion_ids
            == (row.completion_ids[:-1])
        )


def test_recorded_end_is_not_written_twice():
    tokenizer = make("prepend")
    row = parse({"prompt": "x=", "completion": "42</s>", "reward": 1.0}, tokenizer)
    assert row.completion_ids == parse({"prompt": "x=", "completion": "42", "reward": 1.0}, tokenizer).completion_ids


@pytest.mark.parametrize("kind", ["bytes", "chatml", "llama3", "byte_level", "gemma"])
@given(prompt=TEXTS, text=TEXTS)
def test_other_vocabularies_encode_a_text_as_alone(kind, prompt, text):
    tokenizer = make(kind)
    head = tokenizer.prompt_ids(Example(prompt, "", ""))
    # Byte-level words end at an apostrophe, or not, by the character before it.
    assume(head and not text.startswith("'"))
    assert encode_continuation(tokenizer, head, text) == tokenizer.encode(text)


@given(head=st.lists(st.integers(0, 350), min_size=1, max_size=5), ids=st.lists(st.integers(0, 350), max_size=8))
def test_byte_level_ids_decode_as_in_the_library(head, ids):
    tokenizer = make("byte_level")
    alone = tokenizer._tokenizer.decode(
        [token for token in ids if token not in tokenizer.eos_ids], skip_special_tokens=False
    )
    assert decode_continuation(tokenizer, head, ids) == alone


@pytest.mark.parametrize("cleanup", [True, False])
@given(
    prompt=st.sampled_from(["tom has", "how many", "seven ."]),
    words=st.lists(st.sampled_from(["tom", "has", "seven", "apples", "how"]), max_size=5),
)
def test_words_are_separated_from_the_prompt(cleanup, prompt, words):
    tokenizer = word_pieces(cleanup=cleanup)
    head = tokenizer.prompt_ids(Example(prompt, "", ""))
    for text in ("".join(f" {word}" for word in words), "s" + "".join(f" {word}" for word in words)):
        assert decode_continuation(tokenizer, head, encode_continuation(tokenizer, head, text)) == text
    joined = "".join(token_texts(tokenizer).of(np.array(encode_continuation(tokenizer, head, " apples how"))))
    assert joined == " apples how"


@given(prompt=st.text(Characters.TEXT, min_size=1, max_size=6), text=st.text(Characters.TEXT, max_size=6))
def test_tokenizer_of_the_user_gets_known_characters(prompt, text):
    tokenizer = Characters()
    head = tokenizer.encode(prompt)
    ids = encode_continuation(tokenizer, head, text)
    assert ids == tokenizer.encode(text)
    assert decode_continuation(tokenizer, head, [*ids, tokenizer.eos_ids[0]]) == text


class Sentences:
    """A tokenizer of a user's that wraps sentencepiece: a space before every text, one less where it decodes."""

    bos_id, eos_ids, pad_id, vocab_size = 256, (257,), 258, 264
    inner = ByteTokenizer()

    def encode(self, text):
        return self.inner.encode(f" {text}") if text else []

    def decode(self, ids):
        return self.inner.decode(ids).removeprefix(" ")

    def decode_all(self, ids):
        return self.inner.decode_all(ids).removeprefix(" ")


@given(prompt=st.text(min_size=1, max_size=6), text=st.text(max_size=6))
def test_tokenizer_of_the_user_may_prepend_a_space(prompt, text):
    tokenizer = Sentences()
    head = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    ids = encode_continuation(tokenizer, head, text)
    assert ids == tokenizer.inner.encode(text)
    assert decode_continuation(tokenizer, head, ids) == text
    assert (
        decode_continuation(tokenizer, [tokenizer.bos_id], encode_continuation(tokenizer, [tokenizer.bos_id], text))
        == text
    )


def test_spaces_before_punctuation_stay(tmp_path):
    """`clean_up_tokenization_spaces` of transformers would remove them from the text that a verifier reads."""
    tokenizer = make("chatml")
    head = tokenizer.encode("a")
    assert decode_continuation(tokenizer, head, tokenizer.encode("Is it 's , . ?")) == "Is it 's , . ?"


def test_text_after_an_unknown_id_keeps_its_space():
    tokenizer = make("prepend")
    head = tokenizer.prompt_ids(Example("x=\n", "", ""))
    ids = [
        *encode_continuation(tokenizer, head, "4"),
        tokenizer.vocab_size + 3,
        *encode_continuation(tokenizer, head, " 2"),
    ]
    assert decode_continuation(tokenizer, head, ids) == f"4{UNKNOWN} 2"
