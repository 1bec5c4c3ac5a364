"""Eight virtual CPU devices and quick compilation, set before JAX starts; the same drawn examples every time.

NumPy runs what a test calls outside of `jax.jit`: `tests.eager`.
"""

import contextlib
import gc
import os
import pathlib
import re
from collections.abc import Generator

import hypothesis
import pytest
from _pytest.doctest import DoctestModule
from hypothesis.internal.conjecture import providers

from tests import bytecode, other_seeds, processes, selection, xla

bytecode.share()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# On an accelerator (`make test-accelerator`) the flags of the CPU's compiler would make slow programs.
flags = xla.flags(devices=xla.devices()) if os.environ["JAX_PLATFORMS"] == "cpu" else ""
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
processes.hear_interrupts()
# A program says where its operations come from for a debugger, which tests do not have.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Traces make many objects that live long: at the default Python walks them for a tenth of the time.
gc.set_threshold(100_000, 50, 100)

from tests import eager, programs  # noqa: E402 (starts JAX)
from train.distributed import compile_cache  # noqa: E402
from train.process.allocator import keep_freed_memory  # noqa: E402

keep_freed_memory()

# A test that starts the command keeps no program of it, unless it says where.
os.environ.setdefault(compile_cache.VARIABLE, "")

programs.share_mlir_context()
compile_cache.write_whole_files()
programs.compress_quickly()
programs.keep_in_memory()

# Half of what Linux allows a process by default: beyond it XLA crashes, and 25 tests compile many programs. To
# drop the programs takes seconds, and to compile them again as many.
MOST_MAPS = 32_000

hypothesis.settings.register_profile("kljax", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("kljax")
# It would draw constants of all sources that are imported, which are others for a test on its own than among others.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants
other_seeds.install()


Collectors = list[pytest.Collector]


class ChooseTests:
    """Marks tests before pytest selects them by their marks, and imports no file without one that it selects."""

    def pytest_ignore_collect(self, collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
        """Leaves out the files whose tests are all in the lists of others."""
        if collection_path.suffix != ".py" or not collection_path.is_relative_to(config.rootpath):
            return None
        file = collection_path.relative_to(config.rootpath).as_posix()
        return None if selection.may_select(config.option.markexpr, file) else True

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: pathlib.Path) -> Generator[None, Collectors, Collectors]:
        """Leaves out doctests of a file without an example."""
        collectors = yield
        if any(isinstance(each, DoctestModule) for each in collectors) and b">>>" not in file_path.read_bytes():
            return [each for each in collectors if not isinstance(each, DoctestModule)]
        return collectors

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Adds the marks of the lists of tests."""
        selection.add_marks(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Lets NumPy run the eager operations of a test and of its fixtures, unless they are for an accelerator or XLA."""
    by_xla = os.environ["JAX_PLATFORMS"] != "cpu" or os.environ.get("KLJAX_TEST_XLA") or item.get_closest_marker("xla")
    with contextlib.nullcontext() if by_xla else eager.run_by_numpy():
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the tests in another order under another seed; skips those of float16 where XLA compiles none."""
    other_seeds.shuffle(items)
    if not xla.compiles_float16():
        skip = pytest.mark.skip(reason="XLA compiles float16 only for CPUs with F16C")
        for item in filter(xla_float16, items):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Lets Python leave out what was imported and collected, which stays, where it walks all objects."""
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Adds what is to see the doctests of the sources as well, as a conftest sees the tests of its folder alone."""
    config.pluginmanager.register(programs)
    config.pluginmanager.register(ForgetPrograms())
    config.pluginmanager.register(ChooseTests())
    if "PYTEST_XDIST_WORKER" not in os.environ:
        programs.make_room()


class ForgetPrograms:
    """Makes room for the programs of the next tests."""

    def __init__(self) -> None:
        self.tests = 0

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        self.tests += 1
        # Counting takes milliseconds.
        if self.tests % 25 == 0:
            programs.forget_beyond(MOST_MAPS)


def xla_float16(item: pytest.Item) -> bool:
    """Says whether a test computes in float16: by its parameters, or marked."""
    return bool(re.search(r"(?<!b)float16", item.name)) or item.get_closest_marker("float16") is not None
