"""The language of the house, as far as it can be tested: docstrings, names, also of tests, and width of the docs."""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.rules import ROOT, Problems, Rule, broken, relative

# A docstring says what a function does, or what a type is; these begin a riddle.
OPENINGS = re.compile(r"(What|Those|Of|Such|Whose)\b")
# The private dialect, and the field's words for it.
DIALECT = {
    r"\b[Ss]ights?\b": "attention mask",
    r"\bwhat is (held|given|kept|asked)\b": "the noun",
    r"\bof (one|those) that\b": "the noun",
    r"\bstaying\b": "constant",
    r"\bthe room\b": "max new tokens",
    r"\bis used up\b": "is donated",
    r"; data\b|\b(is|are) data\b": "a constant",
}
# Names of functions, types and arguments that do not say the type of thing.
NAMES = {
    *("against", "asked", "away", "found", "given", "held", "one", "own", "place"),
    *("room", "sight", "staying", "toward", "turns", "whole"),
}
# As local variables and as names of files these say as little.
LOCAL_NAMES = NAMES | {"kept", "ours", "theirs"}
# A test is named `test_<subject>_<condition>_<result>`: a relative clause makes a riddle of it.
RELATIVE = {"that", "which", "what", "whose", "those", "who"}
WORDS_OF_A_TEST = 8
# Pronouns that stand for a noun.
PRONOUNS = re.compile(r"\b(that of|those)\b")
# A heading states its subject.
QUESTION = re.compile(r"#+ ((What|Which|How|Why|Who|Does|Do|Is|Are|Can|Should)\b.*|.*\?$)")
LIMIT = 100


def below(*folders: str, suffix: str) -> list[pathlib.Path]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob(f"*{suffix}"))]
    return [path for path in paths if "_build" not in path.parts]


SOURCES = below("kljax", "train", "benchmarks", suffix=".py")
TESTS = below("tests", suffix=".py")
PAGES = below("docs", suffix=".md") + sorted(ROOT.glob("*.md"))

# A change log quotes names and texts of its day.
GUIDES = [page for page in PAGES if page.name != "CHANGELOG.md"]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields the name and the docstring of a module and of all that it defines."""
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            yield getattr(node, "name", "the module"), ast.get_docstring(node) or ""


def docstrings_speak_plainly(path: pathlib.Path, tree: ast.Module) -> Problems:
    for name, text in docstrings(tree):
        if OPENINGS.match(text):
            yield f"{name}: begins with {text.split()[0]!r}; begin with a verb or a noun"
        for pattern, better in DIALECT.items():
            if word := re.search(pattern, text):
                yield f"{name}: {word[0]!r}; write {better!r}"


def sections_are_indented_by_two(path: pathlib.Path, tree: ast.Module) -> Problems:
    for name, text in docstrings(tree):
        for section, spaces in re.findall(r"^(Args|Attributes|Returns|Raises|Gradient):\n( *)\S", text, re.MULTILINE):
            if len(spaces) != 2:
                yield f"{name}: {section} is indented by {len(spaces)}"


def docstrings_name_the_noun(path: pathlib.Path, tree: ast.Module) -> Problems:
    for name, text in docstrings(tree):
        if re.search(r"\bthose\b", text):
            yield f"{name}: 'those'; write the noun"


def names_say_the_type_of_thing(path: pathlib.Path, tree: ast.Module) -> Problems:
    for node in ast.walk(tree):
        defines = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if defines and node.name.strip("_").lower() in NAMES:
            yield node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for name in NAMES & {argument.arg.strip("_") for argument in arguments}:
                yield f"{node.name}({name})"


def local_names(node: ast.AST, local: bool = False) -> Iterator[ast.Name]:
    """Yields the names that functions and comprehensions bind; fields of classes and constants are not among them."""
    for child in ast.iter_child_nodes(node):
        if local and isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child
        inside = local and not isinstance(child, ast.ClassDef)
        yield from local_names(child, inside or isinstance(child, (Function, ast.comprehension, ast.NamedExpr)))


def local_variables_say_the_type_of_thing(path: pathlib.Path, tree: ast.Module) -> Problems:
    if path.stem.removeprefix("test_").strip("_") in LOCAL_NAMES:
        yield "the name of the file"
    for name in local_names(tree):
        if name.id.strip("_").lower() in LOCAL_NAMES:
            yield f"line {name.lineno}: {name.id}"


def names_of_tests_are_short_and_without_clauses(path: pathlib.Path, tree: ast.Module) -> Problems:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            words = node.name.split("_")[1:]
            if len(words) > WORDS_OF_A_TEST:
                yield f"{node.name} has {len(words)} words"
            if RELATIVE & set(words):
                yield f"{node.name} has a relative clause"


RULES: dict[Rule, list[pathlib.Path]] = {
    docstrings_speak_plainly: [*SOURCES, *TESTS],
    docstrings_name_the_noun: SOURCES,
    sections_are_indented_by_two: SOURCES,
    names_say_the_type_of_thing: SOURCES,
    local_variables_say_the_type_of_thing: [*SOURCES, *TESTS],
    names_of_tests_are_short_and_without_clauses: TESTS,
}


@functools.cache
def problems() -> dict[Rule, list[str]]:
    return broken(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_has_no_exception_in_any_file(rule: Rule) -> None:
    assert not problems()[rule], "\n".join(problems()[rule])


def lines_of(pages: list[pathlib.Path]) -> Iterator[tuple[str, str]]:
    """Yields each line with its page and number."""
    for page in pages:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            yield f"{relative(page)}:{number}", line


def test_lines_of_prose_are_at_most_100_wide() -> None:
    # Code, tables and single long words, such as links, cannot be wrapped.
    wide, in_code = [], False
    for at, line in lines_of(PAGES):
        in_code = (in_code and not at.endswith(":1")) ^ line.lstrip().startswith("```")
        if not in_code and not line.lstrip().startswith("|") and " " in line.strip() and len(line) > LIMIT:
            wide.append(f"{at} is {len(line)} wide")
    assert wide == []


def test_docs_use_nouns_and_the_usual_words() -> None:
    words = {PRONOUNS.pattern: "the noun", **DIALECT}.items()
    matches = ((at, re.search(pattern, line), better) for at, line in lines_of(GUIDES) for pattern, better in words)
    assert [f"{at}: {word[0]!r}; write {better!r}" for at, word, better in matches if word] == []


def test_headings_are_no_questions() -> None:
    questions = []
    for page in GUIDES:
        without_code = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        questions += [f"{relative(page)}: {line}" for line in without_code.splitlines() if QUESTION.match(line)]
    assert questions == []
