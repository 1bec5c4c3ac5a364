"""Small tokenizers of every kind that a folder may have, made of the vocabularies of the goldens."""

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from train.data.tokenizers import ByteTokenizer
from train.data.tokenizers.files import load_folder
from train.data.tokenizers.folder import FolderTokenizer

FOLDERS = Path(__file__).parents[2] / "goldens/tokenizers"
SPACE = "\u2581"
SPACES = decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()
STRIPPED = decoders.Sequence([*SPACES, decoders.Strip(" ", 1, 0)])
WORDS = ["tom", "has", "seven", "apples", "and", "buys", "how", "many", "##s", "##e", "##n", "##l", "##y"]


def pieces(normalizer=None, pre_tokenizer=None, decoder=STRIPPED, *, rstrip=False) -> FolderTokenizer:
    """BPE over pieces of sentencepiece with byte fallback, `<s>` before a prompt, and the special token `<turn>`."""
    state = json.loads((FOLDERS / "gemma/tokenizer.json").read_text("utf-8"))["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    tokenizer = Tokenizer(models.BPE(state["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return framed(tokenizer, decoder, rstrip=rstrip)


def framed(tokenizer: Tokenizer, decoder=None, *, rstrip=False) -> FolderTokenizer:
    """Adds the special tokens, and `<s>` before a prompt."""
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>")])
    tokenizer.add_special_tokens([AddedToken("<turn>", normalized=False, rstrip=rstrip)])
    first, last = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], pair=["<s>", "$A", "<s>", "$B:1"], special_tokens=[("<s>", first)]
    )
    return FolderTokenizer(tokenizer, special={"bos_token": "<s>", "eos_token": "</s>"}, eos_ids=[last])


def prepended() -> normalizers.Normalizer:
    """The normalizer of older Llama tokenizers, and of GGUF files."""
    return normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])


def metaspace(scheme: str, *, split: bool = False) -> FolderTokenizer:
    """Pieces with the pre-tokenizer of newer Llama tokenizers."""
    return pieces(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split))


def unigram() -> FolderTokenizer:
    """Unigram over pieces."""
    state = json.loads((FOLDERS / "gemma/tokenizer.json").read_text("utf-8"))["model"]
    scores = [(text, -float(len(state["vocab"]) - number)) for text, number in state["vocab"].items()]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=3, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return framed(tokenizer, STRIPPED)


def metaspace_decoder() -> FolderTokenizer:
    """Pieces that the decoder of the same name joins (T5, XLM-R)."""
    return pieces(
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    )


def byte_level(*, add_prefix_space: bool) -> FolderTokenizer:
    """Byte-level BPE; `add_prefix_space` as in RoBERTa."""
    state = json.loads((FOLDERS / "llama3/tokenizer.json").read_text("utf-8"))["model"]
    tokenizer = Tokenizer(models.BPE(state["vocab"], [tuple(merge) for merge in state["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return framed(tokenizer, decoders.ByteLevel())


def golden(kind: str) -> FolderTokenizer:
    """A tokenizer of the goldens, without its template."""
    return load_folder(FOLDERS / kind, chat=False)


def word_pieces(*, cleanup: bool) -> FolderTokenizer:
    """Whole words, and the ends of words (BERT)."""
    letters = [chr(number) for number in range(ord("!"), ord("~") + 1)]
    vocabulary = ["[UNK]", *letters, *WORDS, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(
        models.WordPiece({text: number for number, text in enumerate(dict.fromkeys(vocabulary))}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return framed(tokenizer, decoders.WordPiece(cleanup=cleanup))


class Characters:
    """A tokenizer of a user's: a token for each character it knows, an error for every other."""

    TEXT = "0123456789+-*/= \nab"
    bos_id, eos_ids, pad_id, vocab_size = None, (len(TEXT),), len(TEXT), len(TEXT) + 1

    def encode(self, text):
        return [self.TEXT.index(character) for character in text]

    def decode(self, ids):
        return "".join(self.TEXT[token] for token in ids if token < len(self.TEXT))

    def decode_all(self, ids):
        return "".join([*self.TEXT, "<end>"][token] for token in ids)

    def prompt_ids(self, example):
        return self.encode(example.prompt)


KINDS = {
    "bytes": ByteTokenizer,
    "chatml": functools.partial(golden, "chatml"),
    "llama3": functools.partial(golden, "llama3"),
    "golden_pieces": functools.partial(golden, "gemma"),
    "prepend": lambda: pieces(prepended()),
    "gemma": lambda: pieces(normalizers.Replace(" ", SPACE), decoder=decoders.Sequence(list(SPACES))),
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_never": lambda: metaspace("never"),
    "metaspace_split": lambda: metaspace("first", split=True),
    "metaspace_decoder": metaspace_decoder,
    "unigram": unigram,
    "byte_level": lambda: byte_level(add_prefix_space=False),
    "byte_level_prefix": lambda: byte_level(add_prefix_space=True),
}
