"""The committed results: each JSON file is read, and gives the committed table and verdicts."""

import json
import pathlib

import pytest

from benchmarks import (
    accelerator,
    forests,
    grouped,
    head,
    head_aot,
    memory,
    overhead,
    quickstart,
    rollout,
    train_step,
    turns,
)
from benchmarks.harness.report import Report

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
REPORTS = {
    "accelerator-nvidia-h200": accelerator.report,
    "forests-cpu": forests.report,
    "grouped-cpu": grouped.report,
    "head-aot": head_aot.report,
    "head-cpu": head.report,
    "memory-cpu": memory.report,
    "overhead-cpu": overhead.report,
    "quickstart-cpu": quickstart.report,
    "quickstart-fooled-cpu": quickstart.report,
    "rollout-cpu": rollout.report,
    "train-step-cpu": train_step.report,
    "turns-cpu": turns.report,
}
ISAS = {"avx2": "AVX2", "avx512": "AVX-512"}


def verdicts(report: Report) -> list[list[dict]]:
    """Returns the targets of the report, or of its parts that have some."""
    parts = [part for part in (report, *report.parts) if isinstance(part, Report)]
    return [[check.as_json() for check in part.checks] for part in parts if part.checks]


def test_committed_results_have_reports() -> None:
    assert sorted(path.stem for path in RESULTS.glob("*.json")) == sorted(REPORTS)


@pytest.mark.parametrize("name", REPORTS)
def test_committed_results_give_committed_tables(name: str) -> None:
    fields = json.loads((RESULTS / f"{name}.json").read_text())
    report = REPORTS[name](fields)
    assert report.text == (RESULTS / f"{name}.md").read_text()
    committed = [entry["targets"] for entry in (fields, *fields.get("sizes", [])) if "targets" in entry]
    assert not committed or verdicts(report) == committed


@pytest.mark.parametrize("name", ["rollout-cpu", "train-step-cpu"])
def test_races_under_instruction_sets_name_them(name: str) -> None:
    """As `--isa avx2,avx512` writes them: each model once for each instruction set, in headings, rows and targets."""
    fields = json.loads((RESULTS / f"{name}.json").read_text())
    (models, sizes) = ({size["size"]["vocab"]: size for size in fields["sizes"]}, list[dict]())
    for size in models.values():
        sizes += [{**size, "size": {**size["size"], "isa": isa}} for isa in ISAS]
    report = REPORTS[name]({**fields, "sizes": sizes, "lacking": []})
    headings = [line for line in report.text.splitlines() if line.startswith("### V=")]
    assert headings == [f"### V={vocab:,}, {title}" for vocab in models for title in ISAS.values()]
    for title, checks in zip([*ISAS.values()] * len(models), verdicts(report), strict=True):
        assert all(check["title"].endswith(f", {title}") for check in checks)
        assert f"| kljax, {title} | " in report.text
    # The numbers are those of the model, whatever the instruction set is called.
    for size, checks in zip(sizes, verdicts(report), strict=True):
        assert [check["value"] for check in checks] == [target["value"] for target in size["targets"]]
    less = REPORTS[name]({**fields, "sizes": sizes[:1], "lacking": ["avx512"]})
    assert "without AVX-512, which it lacks" in less.text
