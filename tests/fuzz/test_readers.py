"""Whatever others wrote, a reader takes it by its rules or refuses it in words, in bounded time and memory."""

import resource
import time
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.fuzz.mutations import MUTATIONS, Mutation, mutated
from tests.fuzz.readers import CORPUS, corpus, readers, shown

NAMES = ("answers", "recordings", "parquet", "dumps", "safetensors", "configs", "templates")
SECONDS = 20.0
"""Limit of one input, of the processor: far more than any takes, and far less than a loop without end."""
MEGABYTES = 512
"""Limit of the memory that all inputs of a reader add to the process."""


def fuzzed(name: str, inputs: int) -> Callable[[], None]:
    """Makes a test that reads so many damaged inputs."""
    reader = readers()[name]

    @hypothesis.settings(max_examples=inputs, suppress_health_check=list(hypothesis.HealthCheck), database=None)
    @hypothesis.given(st.integers(0, len(reader.seeds) - 1), MUTATIONS)
    def read(seed: int, mutations: list[Mutation]) -> None:
        content = mutated(reader.seeds[seed], mutations)
        hypothesis.note(f"keep it as tests/fuzz/corpus/{name}-REASON: {shown(content)}")
        began = time.process_time()
        reader.check(content)
        assert time.process_time() - began < SECONDS

    return read


def peak() -> float:
    """Returns the largest memory of this process so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("name", NAMES)
def test_valid_inputs_are_accepted(name):
    reader = readers()[name]
    assert all(reader.check(seed) for seed in reader.seeds)


@pytest.mark.parametrize("name", NAMES)
def test_former_failures_are_refused(name):
    former, reader = corpus(name), readers()[name]
    assert len(former) >= 5
    assert [path.name for path in former if reader.check(path.read_bytes())] == []


def test_every_former_failure_has_a_reader():
    assert sorted(path for name in NAMES for path in corpus(name)) == sorted(CORPUS.iterdir())
    assert set(NAMES) == readers().keys()


@pytest.mark.parametrize("name", NAMES)
def test_damaged_inputs_are_refused_or_obey_rules(name):
    before = peak()
    fuzzed(name, 100)()
    assert peak() - before < MEGABYTES


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_inputs_obey_rules(name):
    before = peak()
    fuzzed(name, 10_000)()
    assert peak() - before < MEGABYTES
