"""The library is tested in float64, with no silent type promotion and no silent broadcasting between ranks."""

import functools
import pathlib
from collections.abc import Iterator

import jax
import pytest

HERE = pathlib.Path(__file__).parent
STRICT = {"jax_enable_x64": True, "jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}

# They run the same program of every public function, so that one worker does all tests of a function.
SHARE_PROGRAMS = (HERE / "test_everywhere.py", HERE / "test_masks.py")
# They compare numbers of formulas, whose operations are the same in every release of JAX, and compile much for it.
ONE_JAX = (
    *("audit", "goldens", "test_costs", "test_devices", "test_every_metric", "test_grid", "test_masks", "test_narrow"),
    *("test_precision", "test_split_invariance", "test_system"),
    *("advantages", "diagnostics", "losses", "ratios"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what one release of JAX is enough for, and puts tests side by side that share compiled programs."""
    for item in items:
        if _is_for_one_jax(item.path):
            item.add_marker(pytest.mark.one_jax)
    shared = [item for item in items if item.path in SHARE_PROGRAMS]
    if shared:
        first = items.index(shared[0])
        others = [item for item in items if item.path not in SHARE_PROGRAMS]
        items[:] = [*others[:first], *sorted(shared, key=_function_of), *others[first:]]


def _function_of(item: pytest.Item) -> str:
    """The public function that a test is called with, or with a call of; none for a test of its own."""
    arguments = item.callspec.params if hasattr(item, "callspec") else {}
    return arguments.get("name") or arguments.get("call_name", "").partition("(")[0]


@functools.cache
def _is_for_one_jax(path: pathlib.Path) -> bool:
    return path.is_relative_to(HERE) and any(name in str(path.relative_to(HERE)) for name in ONE_JAX)


@pytest.fixture(autouse=True, scope="module")
def _strict() -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in STRICT}
    for name, value in STRICT.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
