"""Files whose tests an expression of marks cannot select are not imported."""

import pytest

from tests import selection

TEST, MORE, ALL = "not thorough and not more", "more and not thorough", "not thorough"


@pytest.fixture
def lists(monkeypatch):
    """Lists that have all tests of one file, some of another, and none of a third."""
    names = {
        "more": ["whole.py", "some.py::test_a[1]", "night.py::test_b"],
        "thorough": ["night.py", "some.py::test_c"],
    }
    monkeypatch.setattr(selection, "read_names", names.__getitem__)
    selection.listed_files.cache_clear()
    selection.may_select.cache_clear()
    yield
    selection.listed_files.cache_clear()
    selection.may_select.cache_clear()


@pytest.mark.usefixtures("lists")
@pytest.mark.parametrize(
    ("expression", "files"),
    [
        (TEST, ["some.py", "none.py"]),
        (MORE, ["whole.py", "some.py"]),
        (ALL, ["whole.py", "some.py", "none.py"]),
        ("thorough", ["whole.py", "some.py", "night.py", "none.py"]),
        (f"({MORE}) or accelerator", ["whole.py", "some.py", "night.py", "none.py"]),
        ("", ["whole.py", "some.py", "night.py", "none.py"]),
        ("more and", ["whole.py", "some.py", "night.py", "none.py"]),
    ],
)
def test_files_without_a_selected_test_are_left_out(expression, files):
    every = ("whole.py", "some.py", "night.py", "none.py")
    assert [file for file in every if selection.may_select(expression, file)] == files


def test_files_of_make_test_more_have_all_tests_of_the_list():
    files = {name.partition("::")[0] for name in selection.read_names("more")}
    whole = {name for name in selection.read_names("thorough") if "::" not in name}
    assert all(selection.may_select(MORE, file) for file in files - whole)
    assert not selection.may_select(MORE, "tests/test_selection.py")
