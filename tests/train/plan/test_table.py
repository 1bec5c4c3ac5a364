"""Figures of pages: written between their comments, compared, and missing comments named; `make test-figures` plans."""

import pytest

from tests.train.plan import table
from tests.train.plan.table import FIGURES, Figures, main, replace

PAGE = "before\n\n<!-- plans: begin -->\n\n| 1 |\n\n<!-- plans: end -->\n\nafter\n"


@pytest.fixture
def page(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    path = tmp_path / "docs" / "page.md"
    path.write_text(PAGE)
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "FIGURES", {"plans": Figures("page.md", lambda: "| 2 |\n")})
    return path


def test_stale_page_fails_until_it_is_written(page, capsys):
    assert main(["--check"]) == 1
    assert (
        "error: docs/page.md has other figures; run python -m tests.train.plan.table --write" in capsys.readouterr().err
    )
    assert page.read_text() == PAGE
    assert main([]) == 0
    assert page.read_text() == PAGE
    assert main(["plans", "--write"]) == 0
    assert page.read_text() == PAGE.replace("| 1 |", "| 2 |")
    assert main(["--check"]) == 0


def test_missing_comments_and_unknown_names_are_errors(page, capsys):
    with pytest.raises(RuntimeError, match="experts: the page has no <!-- experts: begin -->"):
        replace(PAGE, "experts", "")
    with pytest.raises(SystemExit):
        main(["others"])
    assert "NAMES: got others, expected some of plans" in capsys.readouterr().err


@pytest.mark.parametrize("name", FIGURES)
def test_pages_have_a_place_for_their_figures(name):
    text = (table.ROOT / "docs" / FIGURES[name].page).read_text()
    inside = text.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0]
    assert replace(text, name, inside.strip() + "\n") == text
