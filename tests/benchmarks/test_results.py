"""The committed results: each JSON file is read, and gives the committed table."""

import dataclasses
import json
import pathlib

import pytest

from benchmarks.suites.aot import plans
from benchmarks.suites.aot import report as aot_report
from benchmarks.suites.head import report as head_report
from benchmarks.suites.head.suite import SizeResults
from benchmarks.suites.model import long_tail
from benchmarks.suites.model import report as model_report
from benchmarks.suites.model.suite import WorkResults

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


def read(name: str) -> tuple[dict, str]:
    return json.loads((RESULTS / f"{name}.json").read_text()), (RESULTS / f"{name}.md").read_text()


def test_the_head() -> None:
    found, text = read("head-cpu")
    sizes = [SizeResults.from_json(fields) for fields in found["sizes"]]
    assert head_report.markdown(found, sizes, found["options"]["device"]) == text
    checks = [[check.as_json() for check in head_report.checks(one, "cpu")] for one in sizes]
    assert checks == [fields["targets"] for fields in found["sizes"]]


@pytest.mark.parametrize(("name", "part"), [("rollout-cpu", "rollout"), ("train-step-cpu", "step")])
def test_whole_models(name: str, part: str) -> None:
    found, text = read(name)
    sizes = [WorkResults.from_json(fields) for fields in found["sizes"]]
    section = found["profile"] if part == "step" else long_tail.lines(found["long_tail"])
    assert model_report.markdown(found, sizes, part) + "".join(f"{line}\n" for line in section) == text
    checks = [[check.as_json() for check in model_report.checks(one, part)] for one in sizes]
    assert checks == [fields["targets"] for fields in found["sizes"]]


def test_plans_of_compilers() -> None:
    found, text = read("head-aot")
    names = {field.name for field in dataclasses.fields(plans.Plan)}
    compiled: list[tuple[plans.Order, plans.Plan | str]] = [
        (
            plans.Order(fields["device"], fields["layout"], fields["program"]),
            fields.get("failed") or plans.Plan(**{name: fields[name] for name in names}),
        )
        for fields in found["results"]
    ]
    written = aot_report.markdown(compiled, found["versions"], plans.FULL, date=found["date"], goals=True)
    assert written == text
