"""The walks of values through calls: what the tool of the docs counts, and how long walks of the trainer may be."""

import pathlib

import pytest

from docs._walks import PAGE, House, walk_table


@pytest.fixture(scope="module")
def house() -> House:
    return House()


def test_walk_follows_names_attributes_methods_and_closures(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kljax").mkdir()
    (tmp_path / "kljax" / "first.py").write_text("""
import functools
from kljax.second import Box, double, unused

def start(value, other):
    alias = value.part
    unused(other)
    def inner():
        return local(1, number=alias)
    Box(value).open(2)
    return functools.partial(double, value), inner

def local(other, number):
    return value_free()

def value_free():
    return double(1)
""")
    (tmp_path / "kljax" / "second.py").write_text("""
class Box:
    def __init__(self, content):
        self._keep(content)
    def _keep(self, content):
        pass
    def open(self, times):
        pass

def double(x):
    return x.twice()

def unused(x):
    pass
""")
    walk = House(tmp_path).walk("kljax.first:start(value)")
    assert [function.partition(":")[2] for function in walk.functions] == [
        *("start", "local", "Box.__init__", "Box._keep", "double"),
    ]
    assert (len(set(walk.files)), walk.returns) == (2, 0)


def test_walk_goes_on_with_the_config_and_the_context_that_holds_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "run.py").write_text("""
def run(loaded):
    config = completed(loaded.config)
    context = agreed(lambda: make_context(config))
    train(context)
    shape = measured(config)
    unrelated(shape)

def completed(config) -> Config: ...
def make_context(config) -> "RunContext": ...
def agreed(make): ...
def measured(config) -> Shape: ...
def train(context): ...
def unrelated(shape): ...
""")
    walk = House(tmp_path).walk("train.run:run(loaded)")
    names = [function.partition(":")[2] for function in walk.functions]
    assert names == ["run", "completed", "make_context", "train", "measured"]


def test_page_has_the_walks_that_the_tool_counts(house: House) -> None:
    missing = set(walk_table(house)) - set(PAGE.read_text().splitlines())
    assert not missing, "run `python -m docs._walks --write`"


def test_walk_of_a_reference_stays_short(house: House) -> None:
    walk = house.walk("train.references.load:load_reference(plan)")
    assert len(walk.functions) <= 15
    assert len(set(walk.files)) <= 8
