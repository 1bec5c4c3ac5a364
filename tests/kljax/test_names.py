"""One name, one meaning: the second policies are those of one table of the documentation."""

import pathlib
import re

import pytest

from tests.kljax.calls import parameters, public_functions

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "estimators.md").read_text()
TABLE = PAGE[PAGE.index("## Names of the second policy") : PAGE.index("## The same name elsewhere")]
NAMES = set(re.findall(r"^\| `(\w+)`", TABLE, re.MULTILINE))


@pytest.mark.parametrize("name", public_functions())
def test_log_probs_have_the_names_of_the_table(name: str) -> None:
    plain = {re.sub("vocab_|top_|rejected_", "", each) for each in parameters(name) if each.endswith("log_probs")}
    assert plain <= NAMES
