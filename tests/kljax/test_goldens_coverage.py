"""Every recorded case is compared by some test, or left out for a reason that stands here."""

import importlib
import pathlib

import pytest

from tests.goldens import cases

TESTS = {cases.SHARED: "test_goldens_*.py", cases.GENERATED: "test_generated_goldens_*.py"}
# (system, function) of the cases that no test compares, with why.
NOT_COVERED: dict[tuple[str, str], str] = {}


@pytest.mark.parametrize(("file", "number"), [(cases.SHARED, 581), (cases.GENERATED, 720)])
def test_every_case_is_compared_or_left_out_for_a_reason(file: str, number: int) -> None:
    for path in sorted(pathlib.Path(__file__).parent.glob(TESTS[file])):
        importlib.import_module(f"tests.kljax.{path.stem}")
    recorded = [case for case in cases.all_cases() if case.file == file]
    assert len(recorded) == number
    for case in recorded:
        left_out = (case.system, case.function) in NOT_COVERED
        assert (case.id in cases.CLAIMED) != left_out, f"{case.id}: compared, or left out for a reason, not both"


def test_every_reason_is_about_recorded_cases() -> None:
    assert set(NOT_COVERED) <= {(case.system, case.function) for case in cases.all_cases()}
