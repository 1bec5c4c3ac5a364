"""The documentation builds without a warning, and leaves no public name out.

In a file of its own, as only processes that build need Sphinx.
"""

import contextlib
import io
import pathlib
import re
import warnings
from unittest import mock

import pytest
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.cmd.build import main as build
from sphinx.util.inventory import InventoryFile

import kljax
from docs import _generate

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    """The built pages. A warning is an error: a reference to nothing, a page in no table of contents, bad markup."""
    out, printed = tmp_path_factory.mktemp("site"), io.StringIO()
    # Python's own warnings are those of Sphinx and its extensions.
    quiet = warnings.catch_warnings(action="ignore")
    # An index of the words of all pages finds no mistake in them.
    unindexed = mock.patch.object(StandaloneHTMLBuilder, "search", False)
    with quiet, unindexed, contextlib.redirect_stderr(printed):
        code = build(["-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(out)])
    assert code == 0, printed.getvalue()
    return out


def test_every_public_name_is_in_the_reference(site):
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    documented = {name for objects in inventory.data.values() for name in objects}
    names = {f"kljax.{name}" for names in _generate.topics().values() for name in names}
    assert names >= {f"kljax.{name}" for name in kljax.__all__}
    assert names <= documented, f"no page has {sorted(names - documented)}"


def test_formulas_need_neither_script_nor_network(site):
    pages = {path.relative_to(site): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert pages[pathlib.Path("estimators.html")].count("<math") > 20
    assert not [name for name, page in pages.items() if re.search(r'(src|href)="https?://[^"]*\.(js|css)', page)]
