"""Faults of recorded routes: of their form, of their experts, and of rows that were cut, in JSON lines and Parquet."""

import copy
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from tests import tiny
from tests.faults.case import Fault
from tests.train.rollouts.test_recorded import SOURCE, row
from train.config.errors import UserError
from train.context import RunContext
from train.rollouts.collect import collect
from train.rollouts.open import open_stream
from train.rollouts.source import SourceError
from train.sequences.token_fields import ROUTES

AREA = "recorded routes"
EXPERTS, ACTIVE = 5, 2
GOOD = [[0, 1], [3, 2], [4, 0]]
"""The experts of a token in each layer."""
NONE = [[-1, -1]] * 3
Change = Callable[[list[Any]], Any]
Write = Callable[[pathlib.Path, list[dict[str, Any]]], pathlib.Path]


@functools.cache
def _context(path: pathlib.Path) -> RunContext:
    experts = f"model.experts={{count: {EXPERTS}, active: {ACTIVE}, width: 8}}"
    options = "rollout.prompts_per_step=2", "optim.share_prompts=false", SOURCE.format(path=path, shuffle="false")
    return tiny.context_of(tiny.config_of(experts, *options))


def _rows(change: Change, changed: Sequence[int]) -> list[dict[str, Any]]:
    """Two prompts of two tokens with two completions of three; the routes of some rows are changed."""
    routes = [*[copy.deepcopy(GOOD) for _ in range(4)], NONE]
    rows = [row(number // 2, number % 2, **{ROUTES: routes}) for number in range(4)]
    return [
        record | {ROUTES: change(copy.deepcopy(routes))} if number in changed else record
        for number, record in enumerate(rows)
    ]


def _read(path: pathlib.Path) -> None:
    """Reads the rows as a run does."""
    context = _context(path)
    collect(context, open_stream(context), 0)


def _json_lines(directory: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _parquet(directory: pathlib.Path, rows: list[dict[str, Any]]) -> pathlib.Path:
    from pyarrow import Table, parquet

    path = directory / "rows.parquet"
    parquet.write_table(Table.from_pylist(rows), path)
    return path


def damaged(write: Write, change: Change, rows: Sequence[int], *words: str) -> Callable[[pathlib.Path], str]:
    """Makes a fault of the routes of some rows; the message has the field and the words."""

    def run(directory: pathlib.Path) -> str:
        path = write(directory, _rows(change, rows))
        try:
            _read(path)
        except (UserError, SourceError) as error:
            return "refused" if all(word in str(error) for word in (ROUTES, *words)) else "silent"
        except Exception:
            return "traceback"
        return "silent"

    return run


def entry(*place: int, value: Any) -> Change:
    """Makes a change of an entry, at a token, a layer of it and an expert of that."""

    def change(routes: list[Any]) -> list[Any]:
        part = routes
        for index in place[:-1]:
            part = part[index]
        part[place[-1]] = value
        return routes

    return change


def each(change: Callable[[list[list[int]]], Any]) -> Change:
    """Makes a change of the routes of every token."""
    return lambda routes: [change(layers) for layers in routes]


def _one_more(layer: list[int]) -> list[int]:
    return [*layer, -1 if -1 in layer else min({*range(EXPERTS)} - {*layer})]


def _exchanged(layers: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*layers, strict=True)]


Cases = dict[str, tuple[Change, tuple[str, ...]]]
FORM = "expected a list of integers [layers, experts] for each id"
DIFFERENT = "expected different ones, or -1 for all of them"
ONE_ROW: Cases = {
    "floats": (each(lambda layers: [[float(expert) for expert in layer] for layer in layers]), ("[0.0, 1.0]", FORM)),
    "one float": (entry(1, 0, 0, value=0.5), (FORM,)),
    "an empty expert": (entry(1, 2, 1, value=None), (FORM,)),
    "an empty layer": (entry(1, 2, value=None), (FORM,)),
    "an empty token": (entry(1, value=None), (FORM,)),
    "an expert over int16": (entry(1, 0, 0, value=40_000), (FORM,)),
    "a layer that is gone at one token": (lambda routes: [*routes[:2], routes[2][:2], *routes[3:]], (FORM,)),
    "an expert that is gone at one token": (entry(2, 1, value=[3]), (FORM,)),
    "a token that is gone": (lambda routes: routes[1:], ("got 4 lists, expected 5, one for each id",)),
    "a token more": (lambda routes: [*routes, NONE], ("got 6 lists, expected 5, one for each id",)),
    "the completion alone": (lambda routes: routes[2:], ("got 3 lists, expected 5",)),
    "no token": (lambda routes: [], ("got 0 lists, expected 5",)),
    "a layer that is gone": (each(lambda layers: layers[1:]), ("got values of [2, 2]", "rows before have [3, 2]")),
    "an expert more": (each(lambda layers: [_one_more(layer) for layer in layers]), ("got values of [3, 3]",)),
    "no routes": (lambda routes: None, ("missing, but not in the rows before",)),
    "an expert of -2": (entry(1, 0, value=[-2, 1]), ("got the experts [-2, 1]", DIFFERENT)),
    "an expert twice": (entry(1, 0, value=[3, 3]), ("got the experts [3, 3]", DIFFERENT)),
    "one expert of two": (entry(1, 0, value=[-1, 1]), ("got the experts [-1, 1]", DIFFERENT)),
    "an expert that the model lacks": (entry(1, 2, value=[0, 5]), ("row 2", "layer 2", "[0, 5]", "from 0 to 4")),
    "a shared expert's 255": (entry(1, 0, value=[255, 1]), ("row 2", "layer 0", "[255, 1]", "from 0 to 4")),
    "a token without routes": (entry(1, value=NONE), ("row 2 has no experts for 1 of its 4 tokens", "missing=choose")),
    "a layer without routes": (entry(1, 1, value=[-1, -1]), ("row 2 has no experts for 1 of its 4 tokens",)),
}
# A column of Parquet has one type.
ALL_ROWS: Cases = {
    "a number": (lambda routes: 3, ("got 3", FORM)),
    "text": (lambda routes: "AAECAw==", ("got 'AAECAw=='", FORM)),
    "true and false": (each(lambda layers: [[True, False] for _ in layers]), (FORM,)),
    "text of numbers": (each(lambda layers: [["0", "1"] for _ in layers]), (FORM,)),
    "no layers": (each(lambda layers: layers[0]), (FORM,)),
    "no experts": (each(lambda layers: [layer[0] for layer in layers]), (FORM,)),
    "an axis more": (each(lambda layers: [layers]), (FORM,)),
    "a layer that is gone": (each(lambda layers: layers[1:]), ("got 2 layers x 2 experts, expected 3 x 2",)),
    "a dense layer": (each(lambda layers: [*layers, layers[0]]), ("got 4 layers x 2 experts", "only layers with")),
    "an expert more": (each(lambda layers: [_one_more(layer) for layer in layers]), ("3 layers x 3 experts",)),
    "layers and experts exchanged": (each(lambda _: _exchanged([[0, 1], [2, 3], [4, 0]])), ("got 2 layers x 3",)),
    "no routes": (each(lambda layers: NONE), ("row 0 has no experts for 4 of its 4 tokens",)),
}
WRITERS: dict[str, Write] = {"JSON lines": _json_lines, "Parquet": _parquet}
FAULTS = [
    Fault(AREA, f"{kind}, {where}: {name}", damaged(write, change, rows, *words))
    for kind, write in WRITERS.items()
    for where, cases, rows in (("a row", ONE_ROW, (2,)), ("all rows", ALL_ROWS, range(4)))
    for name, (change, words) in cases.items()
] + [Fault(AREA, "Parquet, all rows: bytes", damaged(_parquet, lambda routes: b"\x00\x01", range(4), "got b'", FORM))]
