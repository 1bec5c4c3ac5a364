"""The tokenizer of a renderer without its package; with it, tests/renderers."""

import sys

import pytest

from tests.train.data.test_tokenizer_folder import FOLDERS
from train.config.errors import UserError
from train.data.tokenizers import ByteTokenizer
from train.data.tokenizers.calls import ToolCall
from train.data.tokenizers.files import load_folder
from train.data.tokenizers.rendered import RenderedTokenizer, read_turn


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers", None)
    message = r"^environment\.renderer: got 'qwen3', which needs a package: pip install 'kljax\[train,renderers\]'"
    with pytest.raises(UserError, match=message):
        RenderedTokenizer(load_folder(FOLDERS / "chatml"), "qwen3", {})


def test_calls_without_a_renderer_are_those_of_the_text():
    read = read_turn(ByteTokenizer(), ["calc"], prompt=[1], ids=[2], text="calc 2*3")
    assert read.calls == [ToolCall("calc", "2*3")]
