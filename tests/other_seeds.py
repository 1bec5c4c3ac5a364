"""Other inputs for every test, in a random order: `KLJAX_TEST_SEED=1 make test`.

With a seed, `numpy.random.default_rng` and `jax.random.key` draw other numbers wherever a file of the tests calls them,
hypothesis draws other examples, and the tests run in another order. Recorded inputs (`tests/goldens`) and examples of
docstrings stay as they are, as their results are recorded too.
"""

import os
import pathlib
import random
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest

TESTS = pathlib.Path(__file__).parent
RECORDED = TESTS / "goldens"
STRIDE = 7919
"""Between the numbers that one seed of a test becomes: a prime, larger than the seeds that tests count through."""


def seed() -> int:
    """Returns the seed that was asked for; 0 leaves every test as it is written."""
    return int(os.environ.get("KLJAX_TEST_SEED", "0"))


def install() -> None:
    """Lets this process draw other numbers, if another seed is asked for."""
    if not seed():
        return
    import jax

    np.random.default_rng = _shifted(np.random.default_rng)
    jax.random.key, jax.random.PRNGKey = _shifted(jax.random.key), _shifted(jax.random.PRNGKey)
    hypothesis.core.global_force_seed = seed()
    hypothesis.settings.register_profile("other_seeds", hypothesis.settings.default, derandomize=False, database=None)
    hypothesis.settings.load_profile("other_seeds")


def example(number: int | list[int]) -> np.random.Generator:
    """Returns a generator that no seed changes, for an example: an input that shows that something happens at all."""
    return np.random.default_rng(number)


def example_key(number: int) -> Any:
    """Returns a random key of JAX that no seed changes, for an example."""
    import jax

    return jax.random.key(number)


def shown(condition: Any) -> bool:
    """Says whether an input shows what a test needs, such as a clip that is active; with another seed it need not."""
    return bool(seed() or condition)


def _shifted(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose first argument, a seed, is another number when a test calls it."""

    def drawn(first: Any = None, *others: Any, **options: Any) -> Any:
        return draw(_other(first) if _is_test(sys._getframe(1).f_code.co_filename) else first, *others, **options)

    return drawn


def _other(first: Any) -> Any:
    """Returns the number, or the list of numbers, that stands for this one under the seed that was asked for."""
    if isinstance(first, list | tuple):
        return [*first, seed()]
    return first if first is None else first + STRIDE * seed()


def _is_test(filename: str) -> bool:
    """Says whether a file is one of the tests, and not one that records inputs."""
    path = pathlib.Path(filename)
    return path.is_relative_to(TESTS) and not path.is_relative_to(RECORDED) and filename != __file__


def shuffle(items: list[pytest.Item]) -> None:
    """Puts the files, and the tests of each, in an order that the seed alone decides: the same in every worker."""
    if not seed():
        return
    draw, files = random.Random(seed()), {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    draw.shuffle(groups)
    for group in groups:
        draw.shuffle(group)
    items[:] = [item for group in groups for item in group]
