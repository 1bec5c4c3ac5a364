"""Rollouts with the values of every token as a Parquet file: the columns of `rollout.record`, and more of them."""

import codecs
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from train.rollouts.recording_format import METADATA, format_of
from train.sequences.token_fields import TOKEN_FIELDS
from train.storage.uploads import whole_file

if TYPE_CHECKING:
    import pyarrow


class TokenTexts:
    """The text of each token where it stands: a character of several tokens belongs to the last of them."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        # A model may have more ids than its tokenizer, to round up its vocabulary; they have no text.
        self._bytes = [*token_bytes, b""]
        self._texts = np.array([_text_or_none(piece) for piece in self._bytes], object)

    def of(self, ids: np.ndarray) -> list[str]:
        """Returns a text for each id; joined, they are the text of the sequence."""
        ids = np.minimum(ids, len(self._bytes) - 1)
        texts = self._texts[ids].tolist()
        if None not in texts:
            return texts
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        last = len(ids) - 1
        return [decode(self._bytes[number], index == last) for index, number in enumerate(ids)]


def _text_or_none(piece: bytes) -> str | None:
    """Decodes the bytes of a token; None for a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Some rows of a step, on the host.

    Attributes:
      rows: JSON objects with the scalars and texts of each row.
      arrays: [K, T, ...] values of each token by the names of the columns, `tokens` and the two masks among them.
    """

    rows: Sequence[Mapping[str, Any]]
    arrays: Mapping[str, np.ndarray]


def write_table(path: Path, rows: TokenRows, texts: TokenTexts, metadata: Mapping[str, Any]) -> int:
    """Writes a Parquet file atomically, and returns its bytes.

    Raises:
      OSError: the file cannot be written.
    """
    from pyarrow import parquet

    table = make_table(rows, texts)
    table = table.replace_schema_metadata({METADATA: json.dumps({"format": format_of(table.column_names), **metadata})})
    floats = [f"{name}.list.element" for name, column in _values_of(rows.arrays).items() if column.dtype.kind == "f"]
    names = [f"{field.name}.list.element" for field in table.schema]
    with whole_file(path) as partial:
        parquet.write_table(
            table,
            partial,
            compression="zstd",
            use_dictionary=[name for name in names if name not in floats],
            use_byte_stream_split=floats,
            write_statistics=False,
            write_page_checksum=True,
        )
        return partial.stat().st_size


def make_table(rows: TokenRows, texts: TokenTexts) -> "pyarrow.Table":
    """Makes the table: one row for each rollout, a list for each quantity of its tokens."""
    import pyarrow

    arrays = rows.arrays
    token_mask = arrays["token_mask"]
    completion_mask = arrays["completion_mask"]
    prompt_mask = token_mask & ~completion_mask
    tokens = arrays["tokens"]
    columns: dict[str, Any] = pyarrow.Table.from_pylist(list(rows.rows)).to_pydict() if rows.rows else {}
    table = {name: pyarrow.array(values) for name, values in columns.items()}
    table["prompt_ids"] = _lists(tokens, prompt_mask)
    table["completion_ids"] = _lists(tokens, completion_mask)
    pieces = [texts.of(ids[mask]) for ids, mask in zip(tokens, token_mask, strict=True)]
    table["token_texts"] = pyarrow.array(pieces, pyarrow.list_(pyarrow.string()))
    for name, values in _values_of(arrays).items():
        field = TOKEN_FIELDS.get(name)
        mask = token_mask if field is not None and field.prompts else completion_mask
        table[name] = _lists(values, mask, fill=field.fill if field is not None and field.ragged else None)
    return pyarrow.table(table)


def _values_of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x for name, x in arrays.items() if name not in ("tokens", "token_mask", "completion_mask")}


def _lists(values: np.ndarray, mask: np.ndarray, fill: float | None = None) -> "pyarrow.Array":
    """Makes the lists of `values[K, T, ...]` where the mask is true; `fill` is left out of a ragged last axis.

    NaN, of a token without a number, is null.
    """
    import pyarrow

    chosen = values[mask]
    lengths = [mask.sum(-1)]
    lengths += [np.full(math.prod(chosen.shape[:axis]), chosen.shape[axis]) for axis in range(1, chosen.ndim)]
    if fill is not None:
        is_value = chosen != fill
        chosen = chosen[is_value]
        lengths[-1] = is_value.sum(-1).reshape(-1)
    lists = pyarrow.array(chosen.reshape(-1), from_pandas=chosen.dtype.kind == "f")
    for sizes in reversed(lengths):
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        lists = pyarrow.ListArray.from_arrays(offsets, lists)
    return lists
