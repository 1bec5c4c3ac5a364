"""The tokenizer of a GGUF file as `tokenizer.json`: byte-level BPE, or BPE over pieces of sentencepiece.

A file names the pre-tokenizer of byte-level BPE and leaves the rest to the reader: each name stands here for the
regular expression and the normalizer of the models that use it.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from train.weights.gguf.header import Header

SPACE = "\u2581"
# Names that a converter makes up for rows of the embeddings without a token.
FILLER = re.compile(r"\[PAD\d+\]")
# The time to find the merges of a vocabulary grows with the squares of the lengths of its tokens; real ones have 3e7.
MAX_SQUARES = 10**9
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
MARKED = r"[^\r\n\p{L}\p{N}]?"


@dataclasses.dataclass(frozen=True)
class ByteLevelSplit:
    """How byte-level BPE of some models splits a text.

    Attributes:
      pattern: regular expression of a word; None means that of GPT-2.
      digits: whether every digit is a word.
      nfc: whether the text is normalized to NFC first.
      ignore_merges: whether a word that is a token is never merged of parts.
      add_bos: whether a prompt begins with BOS unless the file says otherwise.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


LLAMA3 = ByteLevelSplit(rf"{LETTERS}|\p{{N}}{{1,3}}|{REST}", ignore_merges=True, add_bos=True)
QWEN2 = ByteLevelSplit(rf"{LETTERS}|\p{{N}}|{REST}", nfc=True)
TEKKEN = ByteLevelSplit(
    rf"{MARKED}{UPPER}*{LOWER}+|{MARKED}{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    add_bos=True,
)
SPLITS: Mapping[str, ByteLevelSplit] = {
    "gpt-2": ByteLevelSplit(),
    "smollm": ByteLevelSplit(digits=True),
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
}
IDS: Mapping[str, str] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Keys without an effect on the tokens of a text: ids of roles that nothing here uses, templates by other names.
UNUSED = re.compile(
    r"tokenizer\.(chat_templates|chat_template\..+|huggingface\.json|ggml\.(token_type_count|mask_token_id"
    r"|sep[ae]rator_token_id|cls_token_id|(fim_...|prefix|suffix|middle)_token_id|add_sep_token))"
)
STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a file.

    Attributes:
      tokenizer: the tokenizer.
      config: content of `tokenizer_config.json`.
      eos_ids: ids that end a completion.
      template: the chat template, if there is one.
    """

    tokenizer: tokenizers.Tokenizer
    config: dict[str, Any]
    eos_ids: tuple[int, ...]
    template: str | None


def read_vocabulary(header: Header) -> Vocabulary:
    """Builds the tokenizer of a file.

    Raises:
      ValueError: a key is missing, not understood, or contradicts the tokens; names it.
    """
    keys = _TokenizerKeys(header)
    kind = keys.value("model", str)
    if kind not in ("gpt2", "llama"):
        raise keys.error("model", f"got {kind!r}, expected gpt2 or llama")
    tokens = keys.value("tokens", list)
    if sum(len(token) ** 2 for token in tokens) > MAX_SQUARES:
        raise keys.error("tokens", f"got {len(max(tokens, key=len)):,} characters, which is no token")
    if len(set(tokens)) < len(tokens):
        raise keys.error("tokens", "duplicate token")
    types = keys.value("token_type", np.ndarray, np.full(len(tokens), TokenType.NORMAL))
    if len(types) != len(tokens):
        raise keys.error("token_type", f"got {len(types)} types of {len(tokens)} tokens")
    wrong = types[~np.isin(types, [0, *TokenType])]
    if len(wrong):
        raise keys.error("token_type", f"got {wrong[0]}, expected types from 0 to {max(TokenType)}")
    try:
        tokenizer, add_bos = _byte_level(keys, tokens, types) if kind == "gpt2" else _pieces(keys, tokens, types)
        tokenizer.add_special_tokens(_added(tokens, types, TokenType.CONTROL))
        tokenizer.add_tokens(_added(tokens, types, TokenType.USER_DEFINED))
    except ValueError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise keys.error("merges", f"the tokenizer cannot be made of them: {error}") from None
    add_bos = keys.value("add_bos_token", bool, add_bos)
    add_eos = keys.value("add_eos_token", bool, False)
    ids = {role: keys.token_id(name, len(tokens)) for role, name in IDS.items()}
    special = {role: tokens[number] for role, number in ids.items() if number is not None}
    if add_bos and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, ids["bos_token"])]
        )
    eos_ids = [keys.token_id(name, len(tokens)) for name in STOPS]
    template = keys.template()
    keys.check_all_read()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    stops = tuple(dict.fromkeys(number for number in eos_ids if number is not None))
    return Vocabulary(tokenizer, config, stops, template)


class _TokenizerKeys:
    """The keys `tokenizer.ggml.*`, which remembers the keys that were read."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._read: set[str] = set()
        self.arch = header.keys.get("general.architecture")

    def error(self, name: str, problem: str) -> ValueError:
        return ValueError(f"{self._header.file}: tokenizer.ggml.{name}: {problem}")

    def value(self, name: str, kind: type, *default: Any) -> Any:
        full = f"tokenizer.ggml.{name}"
        self._read.add(full)
        if full not in self._header.keys:
            if not default:
                raise self.error(name, "missing")
            return default[0]
        value = self._header.keys[full]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, f"got {type(value).__name__}, expected {kind.__name__}")
        return value

    def token_id(self, name: str, count: int) -> int | None:
        number: int | None = self.value(name, int, None)
        if number is not None and not 0 <= number < count:
            raise self.error(name, f"got {number}, but there are {count} tokens")
        return number

    def template(self) -> str | None:
        template = self._header.keys.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise ValueError(f"{self._header.file}: tokenizer.chat_template: got no text")
        return template

    def check_all_read(self) -> None:
        unknown = sorted(
            name
            for name in self._header.keys.keys() - self._read - {"tokenizer.chat_template"}
            if name.startswith("tokenizer.") and not UNUSED.fullmatch(name)
        )
        if unknown:
            raise ValueError(f"{self._header.file}: {', '.join(unknown)}: not understood; it may change the tokens")


def _added(tokens: Sequence[str], types: np.ndarray, kind: TokenType) -> list[AddedToken]:
    numbers = np.flatnonzero(types == kind).tolist()
    return [AddedToken(tokens[number], normalized=False, special=kind == TokenType.CONTROL) for number in numbers]


def _byte_level(keys: _TokenizerKeys, tokens: Sequence[str], types: np.ndarray) -> tuple[tokenizers.Tokenizer, bool]:
    """Makes byte-level BPE; returns it, and whether a prompt begins with BOS by default."""
    name = keys.value("pre", str)
    if name not in SPLITS:
        raise keys.error("pre", f"got {name!r}, expected one of {', '.join(SPLITS)}")
    split = SPLITS[name]
    merges = [tuple(merge.split(" ")) for merge in keys.value("merges", list)]
    if any(len(pair) != 2 for pair in merges):
        raise keys.error("merges", "got an entry without exactly one space")
    fillers = set(np.flatnonzero(types == TokenType.UNUSED).tolist())
    vocabulary = {
        token: number for number, token in enumerate(tokens) if not (number in fillers and FILLER.fullmatch(token))
    }
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.ignore_merges))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    space = keys.value("add_space_prefix", bool, False)
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    parts += [] if split.pattern is None else [pre_tokenizers.Split(Regex(split.pattern), "isolated")]
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _pieces(keys: _TokenizerKeys, tokens: Sequence[str], types: np.ndarray) -> tuple[tokenizers.Tokenizer, bool]:
    """Makes BPE over pieces, whose merges follow from the scores; a prompt begins with BOS by default."""
    scores = keys.value("scores", np.ndarray)
    if len(scores) != len(tokens):
        raise keys.error("scores", f"got {len(scores)} scores of {len(tokens)} tokens")
    if keys.value("remove_extra_whitespaces", bool, False):
        raise keys.error("remove_extra_whitespaces", "got true, expected false: not supported")
    keys.value("pre", str, "default")
    gemma = str(keys.arch).startswith("gemma")
    unknown = np.flatnonzero(types == TokenType.UNKNOWN)
    model = models.BPE(
        {token: number for number, token in enumerate(tokens)},
        _merges(tokens, types, np.arange(len(tokens), 0, -1) if gemma else scores),
        unk_token=tokens[unknown[0]] if len(unknown) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    prefix = keys.value("add_space_prefix", bool, not gemma)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer, True


def _merges(tokens: Sequence[str], types: np.ndarray, scores: np.ndarray) -> list[tuple[str, str]]:
    """Lists the pairs of pieces that make up each piece, in the order in which sentencepiece merges them.

    sentencepiece joins the neighbours whose sum has the best score, so that pairs rank by the score of their sum.
    """
    ranks = scores.tolist()
    kinds = types.tolist()
    normal = {token: ranks[number] for number, token in enumerate(tokens) if kinds[number] == TokenType.NORMAL}
    pairs = [
        (-score, number, (token[:cut], token[cut:]))
        for number, (token, score) in enumerate(normal.items())
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    return [pair for *_, pair in sorted(pairs, key=lambda entry: entry[:2])]
