"""Faults of the files that a run reads: task files and recorded completions."""

import dataclasses
import functools
import json
import pathlib
import struct
from collections.abc import Callable
from typing import Any
from unittest import mock

from tests import tiny
from tests.faults.case import Fault, raised
from tests.train.rollouts.test_recorded import BAD, SOURCE, row
from train.config.plan import Plan
from train.context import RunContext
from train.data.tasks.jsonl import read_examples
from train.distributed.global_arrays import RowSplit
from train.models.sharding import batch_sharding
from train.rollouts.open import open_source
from train.rollouts.recorded import write_rows
from train.rollouts.recorded.row_checks import with_checks
from train.rollouts.source import Request, Source, SourceError

AREA = "data"
Run = Callable[[pathlib.Path], str]
GOOD = '{"prompt": "1+2=", "answer": "3"}\n'
DEEP, LONG, HUGE = "[" * 100_000, "9" * 6_000, "1" + "0" * 400


def task(text: str | bytes, *words: str) -> Run:
    """Makes a fault of a task file whose second line is this text; the message has the line and the words."""

    def run(directory: pathlib.Path) -> str:
        path = directory / "task.jsonl"
        path.write_bytes(GOOD.encode() + (text.encode() if isinstance(text, str) else text) + b"\n")
        names = {"prompt": "prompt", "answer": "answer", "solution": "solution"}
        return raised(lambda: read_examples(path, "data.train", **names), f"{path}, line 2: ", *words)

    return run


@functools.cache
def _context() -> RunContext:
    return tiny.context_of(tiny.config_of("rollout.prompts_per_step=2"))


def _open(path: pathlib.Path) -> Source:
    config = tiny.config_of("rollout.prompts_per_step=2", SOURCE.format(path=path, shuffle="false"))
    return open_source(dataclasses.replace(_context(), plan=Plan.of(config)))


def _request(examples: list[Any]) -> Request:
    rows = RowSplit.of(batch_sharding(_context().mesh), 2 * len(examples))
    return Request(examples, 2, 0, key=None, rows=rows)


def _line(**changes: Any) -> str:
    return json.dumps({name: value for name, value in (row(1, 1) | changes).items() if value is not None})


def recorded(line: str | bytes, *words: str) -> Run:
    """Makes a fault of a recording whose third row is this line; the message has the line and the words."""

    def run(directory: pathlib.Path) -> str:
        path = directory / "rows.jsonl"
        text = "".join(json.dumps(row(0, sample)) + "\n" for sample in range(2))
        path.write_bytes(text.encode() + (line.encode() if isinstance(line, str) else line) + b"\n")
        return raised(lambda: _open(path), f"rollout.source.path: {path}, line 3: ", *words)

    return run


def _changed(directory: pathlib.Path, replacement: str) -> str:
    """Changes a recording after the run has started, which can be continued then."""
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row(number // 2, number % 2)) + "\n" for number in range(4)))
    source = _open(path)
    path.write_text(replacement)
    request = _request(_context().prompts.batch(0)[:2])
    return raised(lambda: source.sample(request), f"{path}, line 1: changed since the start", error=SourceError)


def _surrogate(directory: pathlib.Path) -> str:
    """Records a prompt that UTF-8 cannot hold, and reads it as it was."""
    rows = [row(0, sample) | {"prompt": "a\ud800b"} for sample in range(2)]
    try:
        write_rows(directory, 0, rows)
        source = _open(directory / "00000000.jsonl")
        examples = source.sample(_request([None])).examples
    except Exception:
        return "traceback"
    return "identical" if [example.prompt for example in examples] == ["a\ud800b"] * 2 else "silent"


def parquet(rows: list[dict[str, Any]], *words: str) -> Run:
    """Makes a fault of rows of Parquet; the message has the line and the words."""

    def run(directory: pathlib.Path) -> str:
        import pyarrow
        from pyarrow import parquet

        path = directory / "rows.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return raised(lambda: _open(path), f"rollout.source.path: {path}, line ", *words)

    return run


def _not_parquet(content: bytes) -> Run:
    def run(directory: pathlib.Path) -> str:
        path = directory / "rows.parquet"
        path.write_bytes(content)
        return raised(lambda: _open(path), f"rollout.source.path: {path} cannot be read as Parquet")

    return run


def directory_of(change: Callable[[pathlib.Path], object], *words: str) -> Run:
    """Makes a fault of a recording of three steps, one of whose files is changed."""

    def run(directory: pathlib.Path) -> str:
        for step in range(3):
            write_rows(directory, step, [row(step, sample) for sample in range(2)])
        _open(directory)
        change(directory)
        return raised(lambda: _open(directory), f"rollout.source.path: {directory}", *words)

    return run


def _checked_rows() -> list[dict[str, Any]]:
    """Returns the rows of two steps with their checks, as one file."""
    return [checked for step in range(2) for checked in with_checks([row(2 * step + i // 2, i % 2) for i in range(4)])]


def checked_parquet(change: Callable[[list[dict[str, Any]]], Any], *words: str) -> Run:
    """Makes a fault of recorded rows that were written to Parquet, and changed."""

    def run(directory: pathlib.Path) -> str:
        from pyarrow import Table
        from pyarrow import parquet as writer

        writer.write_table(Table.from_pylist(_checked_rows()), directory / "good.parquet")
        _open(directory / "good.parquet")
        rows = _checked_rows()
        writer.write_table(Table.from_pylist(change(rows) or rows), directory / "rows.parquet")
        return raised(lambda: _open(directory / "rows.parquet"), f"{directory}/rows.parquet, line ", *words)

    return run


def _parquet_bit(directory: pathlib.Path) -> str:
    """Flips a bit of a stored double."""
    from pyarrow import Table
    from pyarrow import parquet as writer

    path = directory / "rows.parquet"
    rows = list(with_checks([row(0, i, log_probs=[-1.25, -0.5, -0.75]) for i in range(2)]))
    writer.write_table(Table.from_pylist(rows), path, compression="none", use_dictionary=False)
    content, stored = path.read_bytes(), struct.pack("<d", -1.25)
    position = content.index(stored + struct.pack("<d", -0.5)) + 2
    path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    return raised(lambda: _open(path), f"{path}, line 1: the row is damaged")


def _parquet_bomb(directory: pathlib.Path) -> str:
    """Writes few bytes of Parquet that stand for many."""
    from pyarrow import Table
    from pyarrow import parquet as writer

    path = directory / "rows.parquet"
    writer.write_table(Table.from_pylist([row(0, 0) | {"note": "x" * 5000} for _ in range(4000)]), path)
    with mock.patch("train.data.parquet.MAX_DECODED", 1 << 20):
        return raised(lambda: _open(path), f"{path} has more than", "when it is decompressed")


def _parquet_rows(directory: pathlib.Path) -> str:
    """Writes few bytes of Parquet that stand for five million rows of nothing."""
    import pyarrow
    from pyarrow import parquet as writer

    path, rows = directory / "rows.parquet", 5_000_000
    writer.write_table(pyarrow.table({"prompt": pyarrow.nulls(rows)}), path)
    return raised(lambda: _open(path), f"{path} has more than", "when it is decompressed")


TASKS: dict[str, Run] = {
    "JSON that is too deep": task('{"prompt": ' + DEEP, "nested too deeply"),
    "an integer of 6,000 digits": task('{"prompt": "a", "answer": ' + LONG + "}", "too many digits"),
    "a key that is there twice": task('{"prompt": "a", "prompt": "b"}', "duplicate key 'prompt'"),
    "no JSON": task("{", "not JSON"),
    "a list": task("[]", "got list, expected an object"),
    "invalid UTF-8": task(b'{"prompt": "\xff"}', "not UTF-8"),
    "a byte order mark within a line": task(GOOD.strip() + "\ufeff", "not JSON"),
    "no prompt": task('{"question": "a"}', "field 'prompt' is missing, got question"),
    "an empty prompt": task('{"prompt": " "}', "expected a non-empty string"),
    "a prompt that is a number": task('{"prompt": 3}', "got 3, expected a non-empty string"),
    "a prompt that is null": task('{"prompt": null}', "got None, expected a non-empty string"),
    "messages without a role": task('{"prompt": [{"content": "a"}]}', "expected text, or messages with 'role'"),
    "messages that are null": task('{"prompt": [null]}', "expected text, or messages with 'role'"),
}
ROWS: dict[str, Run] = {
    "JSON that is too deep": recorded('{"prompt": ' + DEEP, "nested too deeply"),
    "an integer of 6,000 digits": recorded('{"reward": ' + LONG + "}", "too many digits"),
    "a key that is there twice": recorded('{"reward": 0, "reward": 1}', "duplicate key 'reward'"),
    "invalid UTF-8": recorded(b'{"prompt": "\xff"}', "not JSON"),
    "a reward of 10**400": recorded(_line(reward=10**400), "rewards.reward: got 1000", "float32"),
    "a log-prob of -10**400": recorded(_line(log_probs=[-(10**400), -1, -1]), "log_probs: got [-1000", "finite"),
    "a reward of 1e39": recorded(_line(reward=1e39), "rewards.reward: got 1e+39, expected a finite number (float32)"),
    "a log-prob of -1e39": recorded(_line(log_probs=[-1e39, -1, -1]), "log_probs: got [-1e+39, -1, -1]", "finite"),
    "a reward of -inf": recorded(_line(reward=float("-inf")), "rewards.reward: got -inf"),
    "a reward that is true": recorded(_line(reward=True), "rewards.reward: got True"),
    "a log-prob that is true": recorded(_line(log_probs=[True, -1, -1]), "log_probs: got [True"),
    "log-probs that are text": recorded(_line(log_probs="x"), "log_probs: got 'x'"),
    "an id that is true": recorded(_line(completion_ids=[True, 1, 257]), "completion_ids: got [True"),
    "an id that is a float": recorded(_line(prompt_ids=[1.0]), "prompt_ids: got [1.0]"),
    "a prompt that is a number": recorded(_line(prompt=3), "prompt: got 3, expected text"),
    "rewards in a list": recorded(_line(reward=None, rewards=[1]), "rewards: got [1]"),
    **{problem: recorded(json.dumps(fields), problem) for problem, fields in BAD.items()},
    "a file that is empty after the start": lambda directory: _changed(directory, ""),
    "a file with other rows after the start": lambda directory: _changed(directory, "[1, 2]\n" * 9),
    "a file with a bad row after the start": lambda directory: _changed(directory, _line(reward=float("nan")) + "\n"),
    "a lone surrogate in a recorded prompt": _surrogate,
}
PARQUET: dict[str, Run] = {
    "no Parquet": _not_parquet(b"PAR1 or not"),
    "an empty file": _not_parquet(b""),
    "a NaN reward": parquet([row(0, 0, reward=float("nan"))], "rewards.reward: got nan"),
    "a reward over float32": parquet([row(0, 0, reward=1e39)], "rewards.reward: got 1e+39"),
    "a null among ids": parquet([row(0, 0, completion_ids=[None, 1, 257])], "completion_ids: got [None"),
    "ids that are floats": parquet([row(0, 0, completion_ids=[0.0, 0.0, 257.0])], "completion_ids: got [0.0"),
    "ids that are text": parquet([row(0, 0, completion_ids=["a", "b", "c"])], "completion_ids: got ['a'"),
    "a positive log-prob": parquet([row(0, 0, log_probs=[1.0, -1.0, -1.0])], "log_probs: got [1.0", "not positive"),
    "an answer in a binary column": parquet([row(0, 0, answer=b"3")], "answer: got b'3', expected text"),
    "a row without prompt": parquet([{"completion": "3"}], "missing both prompt_ids and prompt"),
}
CHECKED: dict[str, Run] = {
    "a changed log-prob": checked_parquet(lambda rows: rows[2].update(log_probs=[-9.0, -0.5, 0.0]), "row is damaged"),
    "a changed reward": checked_parquet(lambda rows: rows[1].update(reward=7), "row is damaged"),
    "a row that is gone": checked_parquet(lambda rows: rows[:1] + rows[2:], "rows are missing or doubled"),
    "two rows in another order": checked_parquet(lambda rows: [rows[1], rows[0], *rows[2:]], "missing or doubled"),
    "a step that is doubled in part": checked_parquet(lambda rows: rows[:4] + rows[:2], "got 2 rows, expected 4"),
    "a flipped bit of a double": _parquet_bit,
    "a bomb": _parquet_bomb,
    "a bomb of empty rows": _parquet_rows,
}
DIRECTORIES: dict[str, Run] = {
    "the first file is gone": directory_of(lambda path: (path / "00000000.jsonl").unlink(), "lacks 00000000.jsonl"),
    "a file between is gone": directory_of(lambda path: (path / "00000001.jsonl").unlink(), "1 of the 3 files"),
    "the last file is gone": directory_of(lambda path: (path / "00000002.jsonl").unlink(), "lacks 00000002.jsonl"),
    "a file is empty": directory_of(lambda path: (path / "00000001.jsonl").write_bytes(b""), "got no row"),
    "the count is damaged": directory_of(lambda path: (path / "count.sealed").write_text("{}"), "is damaged"),
}
FAULTS = [
    Fault(AREA, f"{kind}: {name}", run)
    for kind, cases in (
        ("task file", TASKS),
        ("recording", ROWS),
        ("Parquet", PARQUET),
        ("recorded Parquet", CHECKED),
        ("directory of a recording", DIRECTORIES),
    )
    for name, run in cases.items()
]
