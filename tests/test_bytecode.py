"""Of the processes that start together one compiles a source, and the others read it."""

import importlib.abc
import importlib.machinery
import sys
import time
from concurrent import futures
from types import SimpleNamespace

import pytest
from _pytest.assertion import rewrite

from tests import bytecode


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source whose bytecode is kept apart."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    path = tmp_path / "source.py"
    path.write_text("assert True\n")
    return path


def do_three_times_at_once(act):
    with futures.ThreadPoolExecutor(3) as threads:
        return [*threads.map(lambda _: act(), range(3))]


def test_source_is_compiled_once(source):
    compiled = []

    class Loader(importlib.machinery.SourceFileLoader):
        # Python's own: that of the loader may be the shared one already.
        get_code = bytecode.compiled_once(importlib.abc.SourceLoader.get_code)

        def source_to_code(self, *arguments, **options):
            compiled.append(arguments)
            time.sleep(0.05)
            return super().source_to_code(*arguments, **options)

    codes = do_three_times_at_once(lambda: Loader("source", str(source)).get_code("source"))
    assert [code.co_filename for code in codes] == 3 * [str(source)]
    assert len(compiled) == 1


def test_assertions_are_rewritten_once(source, monkeypatch, pytestconfig):
    rewritten, rewrite_test = [], rewrite._rewrite_test

    def slow(*arguments):
        rewritten.append(arguments)
        time.sleep(0.05)
        return rewrite_test(*arguments)

    monkeypatch.setattr(rewrite, "_rewrite_test", slow)
    execute = bytecode.rewritten_once(lambda hook, module: None)
    module = SimpleNamespace(__file__=str(source))
    do_three_times_at_once(lambda: execute(SimpleNamespace(config=pytestconfig), module))
    assert len(rewritten) == 1
    assert rewrite._read_pyc(source, rewrite.get_cache_dir(source) / f"source{rewrite.PYC_TAIL}")
