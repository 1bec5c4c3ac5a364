"""Every example of the documentation runs, and what its pages say of presets and fields holds."""

import ast
import doctest
import inspect
import operator
import pathlib
import re

import numpy as np
import pytest

import kljax
from docs import _docstrings, _formulas, _generate
from kljax.systems._table import SYSTEMS
from tests.train.config import built
from train.config.load import parse
from train.config.yaml_text import parse_yaml

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Products of two calls, the KL to the sampler, and a divisor that is no field.
NO_FIELD = {
    "verl/full",
    "trl/k3+use_bias_correction_kl+sequence",
    "prime-rl/kl_tau",
    "prime-rl/mismatch_kl",
    "trinity/seq-mean-token-sum-norm",
}
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def test_unknown_command_of_a_formula_is_refused():
    assert "max_length" in _formulas.to_mathml(r"1 / \text{max\_length}", "inline")
    with pytest.raises(ValueError, match="MathML cannot show"):
        _formulas.to_mathml(r"\nosuch{x}", "inline")


def test_reference_begins_with_the_first_functions():
    topics = _generate.topics()
    assert list(topics)[: len(_generate.TOPICS)] == list(_generate.TOPICS)
    assert all(topics.values())
    first = {names[0] for names in topics.values()}
    assert {"estimate_kl", "reference_kl_loss", "centered_kl_advantages", "token_log_probs", "token_weights"} <= first


@pytest.mark.parametrize("row", kljax.systems.entries(kind="kl"), ids=lambda row: row.key)
def test_config_field_of_an_estimator_loads(row):
    field = _generate.config_field(row)
    assert (field == "") == (row.key in NO_FIELD)
    if field:
        path, _, name = field.partition(": ")
        config, _ = built.build(f"{path}={name}", f"{path.replace('estimator', 'coef')}=0.1")
        estimator = operator.attrgetter(path)(config)
        assert estimator in (row.call.arguments["estimator"], "low_var_kl")


def test_each_migration_page_has_its_presets_and_fields():
    for system in SYSTEMS:
        page = _generate.fill((DOCS / "migrate" / f"{system}.md").read_text())
        names = {path.stem for path in (ROOT / "configs/presets" / system).glob("*.yaml")}
        assert {name for name in names if f"`preset: {system}/{name}`" in page} == names != set()
        assert " in a config |" in page
        # Of the reductions, each that the library has is a value of the field.
        rows = kljax.systems.entries(system=system, kind="reduction")
        assert all(f"`loss.aggregation: {row.key}`" in page for row in rows if row.key not in NO_FIELD)


def test_pages_with_generated_parts_say_where_they_are():
    for page in PAGES:
        text = page.read_text()
        assert (_generate.NOTE in text) == (_generate.fill(text) != text), page
        assert _generate.NOTE not in _generate.fill(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_examples_run(page):
    blocks = [text for language, text in BLOCK.findall(page.read_text()) if language == "python"]
    assert all(text.startswith(">>> ") for text in blocks), "an example shows what it prints, so that it is checked"
    source = "\n".join(blocks)
    test = doctest.DocTestParser().get_doctest(source, {}, str(page.relative_to(ROOT)), str(page), 0)
    report: list[str] = []
    with np.printoptions():  # a page may choose how arrays are printed
        doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_configs_load(page):
    for language, text in BLOCK.findall(page.read_text()):
        if language == "yaml":
            fields, repeated = parse_yaml(text)
            assert not repeated
            parse({"steps": 1, **fields})  # raises with every problem


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_calls_in_the_text_fit_their_functions(page):
    for text in re.findall(r"`([a-z_]\w*\([^`]*\))`", page.read_text()):
        name = text.partition("(")[0]
        if name in kljax.__all__:
            call = ast.parse(text, mode="eval").body
            keywords = {keyword.arg: None for keyword in call.keywords}
            inspect.signature(getattr(kljax, name)).bind_partial(*call.args, **keywords)


def test_docstrings_become_markup_with_the_same_meaning():
    lines = ["The size `|x|` of a * b_, or |c|:", "", "    mode   1 / N", "    other  1", "", ">>> print('`*')", "`*"]
    expected = ["The size ``|x|`` of a \\* b\\_, or \\|c\\|:", "", "::", "", *lines[2:]]
    assert _docstrings.to_rst(lines) == expected


def test_docstring_with_half_a_code_span_is_refused():
    with pytest.raises(ValueError, match="backtick"):
        _docstrings.to_rst(["The `mask of"])
