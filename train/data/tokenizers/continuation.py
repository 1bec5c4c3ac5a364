"""Encoding and decoding of completions, which go on after a prompt.

Many vocabularies of sentencepiece put a space before every text, and take one away when they decode: `42` alone has the
tokens of ` 42`. So a completion is encoded and decoded behind tokens of its prompt, the anchor, which is cut off.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from train.data.tokenizers.byte import ByteTokenizer
from train.data.tokenizers.protocol import UNKNOWN, Tokenizer

# Anchors of each kind: a character takes up to 4 tokens, and a text may merge with the tokens before it.
MAX_ANCHORS = 8


def encode_continuation(tokenizer: Tokenizer, prompt_ids: Sequence[int], text: str) -> list[int]:
    """Encodes `text` as it goes on after a prompt, without EOS; the inverse of `decode_continuation`.

    The tokens of the prompt stay as they are, also where a tokenizer would merge its end with the text.

    Args:
      tokenizer: any tokenizer.
      prompt_ids: ids of the prompt.
      text: the text after it; texts of special tokens become their ids, as in `Tokenizer.encode`.

    Returns:
      Ids that `decode_continuation` decodes to `text`, if the vocabulary can spell it.

    Example:
        >>> from train.data.tokenizers import ByteTokenizer
        >>> encode_continuation(ByteTokenizer(), [49, 61], "42")
        [52, 50]
    """
    context = _context(tokenizer, prompt_ids)
    candidates = []
    # A normalizer may change the text, and an end does not show.
    stripped = text.lstrip(" ")
    spelled = text[: len(text) - len(stripped)] + tokenizer.decode(tokenizer.encode(text)).lstrip(" ")
    # A tokenizer that puts no space before a text that begins with one needs one more.
    for written in (text, f" {text}"):
        for ids in _encode_after(tokenizer, context, written):
            if decode_continuation(tokenizer, prompt_ids, ids) == spelled:
                return ids
            candidates.append(ids)
    return candidates[0]


def decode_continuation(tokenizer: Tokenizer, prompt_ids: Sequence[int], ids: Iterable[int]) -> str:
    """Decodes `ids` as they go on after a prompt, without EOS ids; the inverse of `encode_continuation`.

    Args:
      tokenizer: any tokenizer.
      prompt_ids: ids of the prompt; it ends with a whole character.
      ids: the ids after it.

    Returns:
      The text, without a space that the tokenizer puts before every text there.

    Example:
        >>> from train.data.tokenizers import ByteTokenizer
        >>> decode_continuation(ByteTokenizer(), [49, 61], [32, 52, 50])
        ' 42'
    """
    return decode_after(tokenizer.decode, _context(tokenizer, prompt_ids), list(ids))


def decode_after(decode: Callable[[Sequence[int]], str], before: Sequence[int], ids: Sequence[int]) -> str:
    """Decodes `ids` to the text that they add behind the tokens `before`."""
    for anchor, start in _anchors(before, decode):
        text = decode([*anchor, *ids])
        if text.startswith(start):
            return text[len(start) :]
    return decode(ids)


def _context(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Sequence[int]:
    """Returns the prompt; nothing for bytes, which are equal anywhere, or if a text begins there, behind BOS alone."""
    begins = isinstance(tokenizer, ByteTokenizer) or all(token == tokenizer.bos_id for token in prompt_ids)
    return [] if begins else prompt_ids


def _anchors(before: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[tuple[Sequence[int], str]]:
    """Yields some of the tokens, if they are whole characters, and their text: the last ones, then single ones."""
    ends = (before[-count:] for count in range(1, min(MAX_ANCHORS, len(before)) + 1))
    single = (before[index : index + 1] for index in range(len(before) - 2, -1, -1))
    for tokens in (ends, single):
        texts = ((anchor, decode(anchor)) for anchor in tokens)
        yield from itertools.islice((pair for pair in texts if pair[1] and UNKNOWN not in pair[1]), MAX_ANCHORS)


def _encode_after(tokenizer: Tokenizer, context: Sequence[int], text: str) -> Iterator[list[int]]:
    """Yields the ids of `text` behind some anchors, unless the two merge; then the ids of `text` alone."""
    if context:
        letters = itertools.islice(dict.fromkeys(text.replace(" ", "")), MAX_ANCHORS)
        for before in (*(anchor_text for _, anchor_text in _anchors(context, tokenizer.decode_all)), *letters):
            prefix = tokenizer.encode(before)
            ids = tokenizer.encode(before + text)
            if ids[: len(prefix)] == prefix:
                yield ids[len(prefix) :]
    yield tokenizer.encode(text)
