"""Numbers that are not finite end a run in words, and are never saved."""

from pathlib import Path

import pytest

from tests.faults.case import BAD, Fault
from tests.faults.numbers import FAULTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_run")]
REFERENCES = [fault for fault in FAULTS if fault.name.startswith("a reference")]


@pytest.mark.parametrize("fault", REFERENCES, ids=lambda fault: fault.name)
def test_nonfinite_references_are_refused(fault: Fault, tmp_path: Path):
    assert fault.run(tmp_path) == "refused"


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in REFERENCES], ids=lambda fault: fault.name)
def test_divergence_ends_in_words(fault: Fault, tmp_path: Path):
    assert fault.run(tmp_path) not in BAD


def test_references_and_divergence_are_listed():
    assert len(REFERENCES) == 2
    assert len(FAULTS) >= 14
