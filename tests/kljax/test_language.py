"""The language of the house, as far as it can be tested: docstrings, names, also of tests, and width of the docs."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]

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


def relative(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


SOURCES = below("kljax", "train", "benchmarks", suffix=".py")
TESTS = below("tests", suffix=".py")
PAGES = below("docs", suffix=".md") + sorted(ROOT.glob("*.md"))

# A change log quotes names and texts of its day.
GUIDES = [page for page in PAGES if page.name != "CHANGELOG.md"]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the docstring of a module and of all that it defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Documented):
            yield getattr(node, "name", path.stem), ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=relative)
def test_docstrings_speak_plainly(path: pathlib.Path) -> None:
    for name, text in docstrings(path):
        assert not OPENINGS.match(text), f"{name}: begins with {text.split()[0]!r}; begin with a verb or a noun"
        for pattern, better in DIALECT.items():
            word = re.search(pattern, text)
            assert word is None, f"{name}: {word[0]!r}; write {better!r}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_sections_are_indented_by_two(path: pathlib.Path) -> None:
    for name, text in docstrings(path):
        for section, spaces in re.findall(r"^(Args|Attributes|Returns|Raises|Gradient):\n( *)\S", text, re.MULTILINE):
            assert len(spaces) == 2, f"{name}: {section} is indented by {len(spaces)}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_names_say_the_type_of_thing(path: pathlib.Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.name.strip("_").lower() not in NAMES, node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            assert not NAMES & {argument.arg.strip("_") for argument in arguments}, node.name


def local_names(node: ast.AST, local: bool = False) -> Iterator[ast.Name]:
    """Yields the names that functions and comprehensions bind; fields of classes and constants are not among them."""
    for child in ast.iter_child_nodes(node):
        if local and isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child
        inside = local and not isinstance(child, ast.ClassDef)
        yield from local_names(child, inside or isinstance(child, (Function, ast.comprehension, ast.NamedExpr)))


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=relative)
def test_local_variables_say_the_type_of_thing(path: pathlib.Path) -> None:
    assert path.stem.removeprefix("test_").strip("_") not in LOCAL_NAMES
    for name in local_names(ast.parse(path.read_text())):
        assert name.id.strip("_").lower() not in LOCAL_NAMES, f"line {name.lineno}: {name.id}"


@pytest.mark.parametrize("path", TESTS, ids=relative)
def test_test_names_are_short_and_without_clauses(path: pathlib.Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            words = node.name.split("_")[1:]
            assert len(words) <= WORDS_OF_A_TEST, f"{node.name} has {len(words)} words"
            assert not RELATIVE & set(words), f"{node.name} has a relative clause"


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_lines_of_prose_are_at_most_100_wide(path: pathlib.Path) -> None:
    # Code, tables and single long words, such as links, cannot be wrapped.
    in_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if not in_code and not line.lstrip().startswith("|") and " " in line.strip():
            assert len(line) <= LIMIT, f"{relative(path)}:{number} is {len(line)} wide"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_docstrings_name_the_noun(path: pathlib.Path) -> None:
    for name, text in docstrings(path):
        assert not re.search(r"\bthose\b", text), f"{name}: 'those'; write the noun"


@pytest.mark.parametrize("path", GUIDES, ids=relative)
def test_docs_use_nouns_and_the_usual_words(path: pathlib.Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for pattern, better in {PRONOUNS.pattern: "the noun", **DIALECT}.items():
            word = re.search(pattern, line)
            assert word is None, f"{relative(path)}:{number}: {word[0]!r}; write {better!r}"


@pytest.mark.parametrize("path", GUIDES, ids=relative)
def test_headings_are_no_questions(path: pathlib.Path) -> None:
    without_code = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in without_code.splitlines():
        assert not QUESTION.match(line), line
