"""The committed results: each JSON file is read, and gives the committed table."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import memory, overhead, quickstart
from benchmarks.harness.results import ContenderResult, Measured
from benchmarks.harness.suite import Suite
from benchmarks.suites.aot import plans
from benchmarks.suites.head.problem import HeadOptions, Size
from benchmarks.suites.head.rates import Rates
from benchmarks.suites.head.suite import HeadSuite
from benchmarks.suites.model import limits, long_tail, packed
from benchmarks.suites.model.problem import ModelWork
from benchmarks.suites.model.suite import ModelSuite

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


def read(name: str) -> tuple[dict, str]:
    return json.loads((RESULTS / f"{name}.json").read_text()), (RESULTS / f"{name}.md").read_text()


def render(suite: Suite, found: dict, size: Callable[..., Any]) -> str:
    """Renders the report of a suite, and compares its verdicts with those of the file."""
    sizes = []
    for fields in found["sizes"]:
        results = {name: ContenderResult(**result) for name, result in fields["results"].items()}
        rates = fields.get("rates")
        sizes.append(Measured(size(**fields["size"]), results, None if rates is None else Rates(**rates)))
        assert [check.as_json() for check in suite.checks(sizes[-1])] == fields["targets"]
    return suite.markdown(found, sizes)


def test_the_head() -> None:
    recorded, text = read("head-cpu")
    assert render(HeadSuite(HeadOptions(**recorded["options"])), recorded, Size) == text


@pytest.mark.parametrize(("name", "part"), [("rollout-cpu", "rollout"), ("train-step-cpu", "step")])
def test_whole_models(name: str, part: str) -> None:
    recorded, text = read(name)
    section = "\n".join(recorded["profile"]) + "\n" if part == "step" else long_tail.markdown(recorded["long_tail"])
    assert render(ModelSuite(part), recorded, ModelWork) + "\n" + section == text


def test_the_price_of_a_limit() -> None:
    recorded, text = read("rollout-limits-cpu")
    assert limits.markdown(recorded) == text


def test_packed_rows() -> None:
    recorded, text = read("update-packed-cpu")
    assert packed.markdown(recorded) == text


def test_the_memory_of_a_recipe() -> None:
    recorded, text = read("memory-cpu")
    assert memory.markdown(recorded) == text


def test_the_overhead_of_a_step() -> None:
    recorded, text = read("overhead-cpu")
    assert overhead.markdown(recorded) == text
    assert [check.as_json() for check in overhead.checks(recorded)] == recorded["targets"]


def test_steps_with_recorded_completions() -> None:
    recorded, text = read("overhead-recorded-cpu")
    assert overhead.recorded_markdown(recorded) == text


@pytest.mark.parametrize("name", ["quickstart-cpu", "quickstart-fooled-cpu"])
def test_the_quickstart(name: str) -> None:
    recorded, text = read(name)
    runs = [quickstart.FinishedRun(**run) for run in recorded["runs"]]
    assert quickstart.markdown(recorded, runs, fooled="fooled" in name) == text


def test_plans_of_compilers() -> None:
    recorded, text = read("head-aot")
    names = {field.name for field in dataclasses.fields(plans.CompiledPlan)}
    compiled = [
        (
            plans.Order(fields["device"], fields["layout"], fields["program"]),
            plans.CompiledPlan(**{name: value for name, value in fields.items() if name in names}),
        )
        for fields in recorded["results"]
    ]
    written = plans.markdown(compiled, recorded["versions"], plans.FULL, date=recorded["date"], goals=True)
    assert written == text
