"""Readers of what others wrote, each with valid inputs and a check of what it makes of a damaged one.

A reader may refuse an input with its error, which is one message for users, or read it. Then what it read obeys the
rules that an independent look at it knows.
"""

import dataclasses
import functools
import io
import json
import math
import pathlib
import re
import struct
import tempfile
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pyarrow
from pyarrow import parquet
from safetensors.numpy import save

from kljax.tools.parity.dump import DumpError, open_dump
from tests import tiny
from train.config.errors import ConfigError, UserError
from train.config.fields import known_fields
from train.config.float32 import fits_float32
from train.config.load import dump_yaml, load, parse
from train.config.yaml_text import parse_yaml
from train.data.tokenizers import chat
from train.data.tokenizers.chat import ChatTemplate
from train.rollouts.recorded import write_rows
from train.rollouts.recorded.files import JsonLinesFile, ParquetFile
from train.rollouts.recorded.record import RecordedRow, find_parent, parse_row
from train.rollouts.recorded.row_checks import with_checks
from train.rollouts.server.answers import AnswerError, Requested, read_answer
from train.sequences.token_fields import LEAST_LOG_PROB

ROOT = pathlib.Path(__file__).parents[2]
CORPUS = pathlib.Path(__file__).parent / "corpus"
EOS, VOCABULARY = 257, 264
LONGEST = 60_000
"""Characters of a message; that of a config has a line for each problem."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader with its inputs.

    Attributes:
      seeds: valid inputs.
      read: reads an input, and asserts the rules of what it read.
      errors: what it may raise.
    """

    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]

    def check(self, content: bytes) -> bool:
        """Reads an input; returns whether it was accepted. An error that is not meant for users is raised."""
        message = None
        try:
            self.read(content)
        except self.errors as error:
            message = str(error)
        assert message is None or 0 < len(message) < LONGEST
        return message is None


@functools.cache
def _scratch() -> pathlib.Path:
    directory = tempfile.TemporaryDirectory()
    _KEPT.append(directory)
    return pathlib.Path(directory.name)


_KEPT: list[Any] = []


def _file(name: str, content: bytes) -> pathlib.Path:
    path = _scratch() / name
    path.write_bytes(content)
    return path


# Answers of a server.

REQUESTED = Requested([1, 2], 4, VOCABULARY, eos_ids=(EOS,))


def _choice(tokens: list[int], reason: str) -> dict[str, Any]:
    log_probs = {"token_logprobs": [-1.5] * len(tokens), "tokens": ["a"] * len(tokens), "top_logprobs": None}
    return {
        **{"index": 0, "text": "a", "token_ids": tokens, "prompt_token_ids": [1, 2], "logprobs": log_probs},
        **{"finish_reason": reason, "stop_reason": None},
    }


def _answer(choice: dict[str, Any]) -> bytes:
    return json.dumps({"id": "cmpl-1", "created": 1, "choices": [choice], "usage": {"total_tokens": 8}}).encode()


def _read_answer(content: bytes) -> None:
    answer = read_answer(REQUESTED, content)
    (choice,) = json.loads(content)["choices"]
    assert content.count(b'"token_ids"') == 1
    ids = answer.completion_ids
    assert ids == choice["token_ids"]
    assert 1 <= len(ids) <= 4
    assert all(type(token) is int and 0 <= token < VOCABULARY for token in ids)
    assert EOS not in ids[:-1]
    assert answer.finished == (ids[-1] == EOS) == (choice["finish_reason"] == "stop")
    values = answer.of_completion("rollout_log_probs")
    assert len(values) == len(ids)
    assert all(value == -math.inf or LEAST_LOG_PROB <= value <= 1e-3 for value in values)


# Recorded rows, which carry checks.


@functools.cache
def _context() -> Any:
    return tiny.context_of(tiny.config_of("rollout.prompts_per_step=2"))


def _rows() -> list[dict[str, Any]]:
    rewards = {"rewards": {"reward": 0.5, "form": 0.5}}
    completions = [
        {
            **{"group": number // 2, "prompt": "1+2=", "prompt_ids": [256, 49], "completion": "3 é"},
            **{"completion_ids": [51, number, EOS], "log_probs": [-1.0, -0.25, -2.5], "finished": True, "answer": "3"},
            "rewards": {"reward": float(number), "form": 0.5},
        }
        for number in range(2)
    ]
    trunk = {"ids": [256, 49, 51, 52, EOS], "trained": [False, False, True, False, True], "version": [0, 0, 1, None, 0]}
    sequences = [
        {"group": 1, **trunk, "log_probs": [None, None, -0.25, None, -2.5], **rewards},
        {"group": 1, "ids": [53], "trained": [True], "version": [3], "log_probs": [-0.5], **rewards}
        | {"parent": {"row": 0, "tokens": 4, "trained": True}},
    ]
    return [*completions, *sequences]


def _recorded() -> bytes:
    write_rows(_scratch(), 0, _rows())
    return (_scratch() / "00000000.jsonl").read_bytes()


def _check_rows(records: list[dict[str, Any]], checks: int) -> None:
    groups: dict[str, list[RecordedRow]] = {}
    for record in records:
        earlier = groups.setdefault(repr(record.get("group")), [])
        parent = find_parent(record, len(earlier))
        earlier.append(parse_row(record, _context(), None if parent is None else earlier[parent]))
    # A row whose check lost its name is a row of others.
    if checks == 4:
        assert records == _rows()


def _read_recorded(content: bytes) -> None:
    records = [record for _, _, record in JsonLinesFile(_file("rows.jsonl", content))]
    _check_rows(records, content.count(b'"kljax_check": "'))


def _as_parquet(compression: str) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(
        pyarrow.Table.from_struct_array(pyarrow.array(list(with_checks(_rows())))), buffer, compression=compression
    )
    return buffer.getvalue()


def _read_parquet(content: bytes) -> None:
    # A lower limit, so that an input that is decoded up to it costs little.
    with mock.patch("train.data.parquet.MAX_DECODED", 1 << 22):
        file = ParquetFile(_file("rows.parquet", content))
    checks = 4 if "kljax_check" in file._table.column_names else 0
    records = [record for _, _, record in file]
    # A damaged schema may rename another column: its rows then differ from their checks.
    _check_rows(records, checks if all("kljax_check" not in record for record in records) else 0)


# Dumps of the parity command.

HEADER = json.dumps({"kljax_parity": 1, "system": "verl", "dtype": "float32", "eos_id": 2, "kl": {"coef": 0.1}})


def _arrays() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        **{"log_probs": -draw.random((3, 4)).astype(np.float32), "mask": np.ones((3, 4), np.int64)},
        **{"tokens": draw.integers(0, 11, (3, 4)), "lengths": np.array([4, 4, 4]), "rewards": draw.random(3)},
        **{"rows": np.array([1]), "logits": draw.random((1, 4, 11)), "metric/kl": np.array(0.5)},
    }


def _npz(save_arrays: Callable[..., Any]) -> bytes:
    buffer = io.BytesIO()
    save_arrays(buffer, header=np.array(HEADER), **_arrays())
    return buffer.getvalue()


def _read_dump(content: bytes) -> None:
    dump = open_dump(_file("dump", content))
    assert dump.header["kljax_parity"] == 1
    trained = dump.read("mask")
    for name in dump:
        values = dump.read(name)
        assert values.size > 0
        assert name.isprintable()
        if values.shape == trained.shape and name in ("log_probs", "advantages"):
            assert not np.isnan(values[trained]).any()
    if "tokens" in dump and "logits" in dump:
        ids = dump.read("tokens")[trained]
        assert ((ids >= 0) & (ids < dump.stored("logits").shape[-1])).all()


def _read_safetensors(content: bytes) -> None:
    """Reads a dump whose header has the length that its prefix says, so that damage reaches its JSON."""
    numbers = sum(array.nbytes for array in _arrays().values())
    _read_dump(struct.pack("<Q", max(len(content) - numbers, 0)) + content)


# Configs.


def _configs() -> list[bytes]:
    smoke = (ROOT / "configs/smoke.yaml").read_bytes()
    return [smoke, dump_yaml(parse(tiny.RAW)[0]).encode(), json.dumps(tiny.RAW).encode()]


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list | tuple):
        return [
            number for entry in (value.values() if isinstance(value, dict) else value) for number in _numbers(entry)
        ]
    return [value] if isinstance(value, float) else []


def _mapping(text: str) -> dict[str, Any]:
    return parse_yaml(text)[0]


def _read_config(content: bytes) -> None:
    loaded = load(_file("config.yaml", content))
    assert all(fits_float32(number) and math.isfinite(number) for number in _numbers(loaded.config.model_dump()))
    # Nothing that was written is dropped without a word, and what is written again is the same config.
    names = {path.split(".")[0] for path in known_fields()}
    assert set(_mapping(content.decode("utf-8-sig"))) <= {*names, "preset"}
    assert parse(_mapping(dump_yaml(loaded.config)))[0] == loaded.config


# Chat templates.

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def _templates() -> list[bytes]:
    folder = ROOT / "tests/goldens/tokenizers"
    return [path.read_bytes() for path in sorted(folder.glob("*/chat_template.jinja"))]


def _read_template(content: bytes) -> None:
    with mock.patch.object(chat, "SECONDS", 1.0):
        text = ChatTemplate(content.decode("utf-8", "replace"), {"bos_token": "<s>"}).render(MESSAGES, reply=True)
    assert len(text) <= 10_000_000


@functools.cache
def readers() -> dict[str, Reader]:
    """Returns the readers by name."""
    tensors = save(_arrays(), {"header": HEADER})[8:]
    return {
        "answers": Reader(
            [
                _answer(_choice([49, EOS], "stop")),
                _answer(_choice([49, 50, 51, 52], "length")),
                _answer(_choice([EOS], "stop")),
            ],
            _read_answer,
            (AnswerError,),
        ),
        "recordings": Reader([_recorded()], _read_recorded, (UserError, ValueError)),
        "parquet": Reader([_as_parquet("none"), _as_parquet("snappy")], _read_parquet, (UserError, ValueError)),
        "dumps": Reader([_npz(np.savez), _npz(np.savez_compressed)], _read_dump, (DumpError,)),
        "safetensors": Reader([tensors], _read_safetensors, (DumpError,)),
        "configs": Reader(_configs(), _read_config, (ConfigError,)),
        "templates": Reader(_templates(), _read_template, (ValueError,)),
    }


def corpus(name: str) -> list[pathlib.Path]:
    """Returns the inputs that a reader once failed on, or that stand for a kind of failure of another one."""
    return sorted(CORPUS.glob(f"{name}-*"))


def shown(content: bytes) -> str:
    """Returns an input in a form that a test can be made of."""
    return re.sub(r"(.{2000}).*", r"\1...", repr(content), flags=re.DOTALL)
