"""The rules of the house, checked: layers, public names, docstrings, signatures."""

import ast
import doctest
import functools
import inspect
import itertools
import operator
import pathlib
import pydoc
import re
import subprocess
import sys
import tomllib
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

import kljax
from kljax.typing import ArrayLike, Mask
from tests.rules import ROOT, Problems, Rule, broken

LIBRARY = sorted((ROOT / "kljax").rglob("*.py"))
SOURCES = LIBRARY + sorted((ROOT / "train").rglob("*.py"))

# A module imports from its own layer or a lower one.
LAYERS = [
    {"_typing", "typing", "batches", "_checks", "_numerics", "_devices", "_narrow", "_npy", "_files", "checkpoint"},
    {"rows"},
    {"masking"},
    {"log_probs", "kl", "ratios"},
    {"aggregation", "rewards", "advantages", "controllers"},
    {"losses", "diagnostics"},
    {"systems", "reference"},
    {"integrations"},
    {"tools", "__main__"},
]
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names}
# Public under a name of their own, as `kljax.systems.get`; everything else is flat in the package.
NAMESPACES = ("systems", "audit", "checkpoint")
ALLOWED_AT_IMPORT = {"jax", "numpy", "kljax"} | set(sys.stdlib_module_names)

# Sections of a public function, in order. "Gradient" stands where one flows, or where a reader expects one;
# "References" where there is a paper or a system to name.
SECTIONS = ("Args", "Returns", "Gradient", "Raises", "Example")
# Topics of functions that are part of a loss, and those of them whose results are constants.
DIFFERENTIATED = {"aggregation", "kl", "log_probs", "losses", "masking", "ratios", "rewards"}
CONSTANTS = re.compile(r".*_mask|token_weights")
# JAX calls them; users do not.
METHODS_OF_PYTREES = ("tree_flatten_with_keys", "tree_unflatten")


def public_names() -> list[str]:
    """The names in the package, and those in its namespaces with the namespace before them."""
    spaces = [space for space in NAMESPACES if hasattr(kljax, space)]
    inner = [f"{space}.{name}" for space in spaces for name in getattr(kljax, space).__all__]
    return [*kljax.__all__, *inner]


def test_class_name_stands_once_in_the_repository() -> None:
    folders = ("kljax", "train", "benchmarks", "tests", "docs")
    texts = {path: path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}
    lines = {path: re.findall(r"^ *class (\w+)", text, re.M) for path, text in texts.items()}
    counts = Counter(itertools.chain.from_iterable(lines.values()))
    places: dict[str, list[str]] = {}
    # A line of a text may look like that of a class.
    for path in (path for path, names in lines.items() if any(counts[name] > 1 for name in names)):
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: collected for name, collected in places.items() if len(collected) > 1} == {}


def thing_of(name: str) -> typing.Any:
    return operator.attrgetter(name)(kljax)


def public_functions() -> list[str]:
    return [name for name in public_names() if inspect.isfunction(thing_of(name))]


def topic(path: pathlib.Path) -> str:
    """The layer's name of a module: its file, or its folder."""
    return path.relative_to(ROOT / "kljax").parts[0].removesuffix(".py")


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The dotted names of the modules that statements import."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names.add(node.module or "")
    return names


def imports_go_one_way(path: pathlib.Path, tree: ast.Module) -> Problems:
    for name in imported(ast.walk(tree)):
        parts = name.split(".")
        if parts[0] == "kljax" and len(parts) > 1 and LAYER[parts[1]] > LAYER[topic(path)]:
            yield f"imports {name} from a higher layer"
        if parts[0] == "train":
            yield f"imports {name}"


def library_imports_only_jax_and_numpy(path: pathlib.Path, tree: ast.Module) -> Problems:
    roots = {name.split(".")[0] for name in imported(tree.body)}
    # An integration is a part of another trainer, in its environment; all of these use flax.
    beside = {path.stem, "flax"} if topic(path) == "integrations" else set()
    yield from (f"imports {name}" for name in roots - beside - (ALLOWED_AT_IMPORT - {"__future__"}))


def test_importing_the_library_loads_nothing_of_the_trainer() -> None:
    script = "import sys, kljax; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"jax", "kljax"} <= loaded
    assert not loaded & {"orbax", "flax", "optax", "chex", "train", "grain", "pydantic", "jaxtyping", "beartype"}


def test_systems_and_audit_load_at_first_use() -> None:
    script = """if True:
        import sys, kljax
        print(*(name for name in sys.modules if name.startswith(("kljax.systems", "kljax.tools"))), sep="|")
        assert {"audit", "systems", "k3"} <= set(dir(kljax)) and not hasattr(kljax, "system")
        print(kljax.systems.get("verl/k1").function, "kljax.tools" in sys.modules, kljax.audit.Audit.__name__)
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\nestimate_kl False Audit\n"


def test_every_public_name_is_in_the_package() -> None:
    names: set[str] = set()
    for path in LIBRARY:
        if path.stem.startswith("_") or topic(path) in (*NAMESPACES, "integrations", "tools"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                names |= set(ast.literal_eval(node.value))
    assert names <= set(kljax.__all__), f"not in kljax.__all__: {sorted(names - set(kljax.__all__))}"
    assert sorted(kljax.__all__) == list(kljax.__all__)
    assert all(hasattr(kljax, name) for name in kljax.__all__)


def test_public_docstrings() -> None:
    for name in public_names():
        thing = thing_of(name)
        text = inspect.getdoc(thing) or ""
        first, _, rest = text.partition("\n")
        assert first.endswith((".", ":", "`")), f"{name}: the first line is not a sentence of its own"
        assert len(first) > 20, name
        assert rest.startswith("\n"), f"{name}: the first line is followed by a blank one"
        if inspect.isfunction(thing):
            check_function_docstring(name, thing, text)


def check_function_docstring(name: str, function: Callable[..., typing.Any], text: str) -> None:
    """Asserts that a docstring has its sections in order, and an example."""
    present = [section for section in re.findall(r"^(\w+):$", text, re.MULTILINE) if section in SECTIONS]
    in_a_loss = function.__module__.split(".")[1] in DIFFERENTIATED and not CONSTANTS.fullmatch(name)
    required = [section for section in SECTIONS if section != "Gradient" or section in present or in_a_loss]
    assert present == required, f"{name}: got the sections {present}, expected {required}"
    assert not re.search(r"^Gradient:\n +None\b", text, re.MULTILINE), f"{name}: no gradient needs no section"
    assert doctest.DocTestParser().get_examples(text), f"{name}: no example that runs"


def test_every_argument_is_documented() -> None:
    for name in public_functions():
        function = thing_of(name)
        documented = documented_arguments(inspect.getdoc(function) or "")
        assert documented == to_document(inspect.signature(function).parameters, documented), name


def to_document(arguments: Iterable[str], documented: Sequence[str]) -> list[str]:
    """Returns the arguments without a mask of which the annotation says all."""
    return [argument for argument in arguments if argument != "mask" or argument in documented]


def documented_arguments(text: str) -> list[str]:
    """The names in the section `Args` of a docstring, in order."""
    section = re.search(r"^Args:\n((?:  .*\n?)*)", text, re.MULTILINE)
    return re.findall(r"^  (\w+): ", section[1], re.MULTILINE) if section else []


def test_methods_of_public_classes_document_arguments_and_results() -> None:
    """Methods of a class that a module with an underscore defines are public as well."""
    for name in (name for name in public_names() if inspect.isclass(thing_of(name))):
        for method, function in public_definitions(ast.parse(inspect.getsource(thing_of(name)))):
            if function.name not in METHODS_OF_PYTREES:
                check_sections(method, function)


def check_sections(name: str, function: ast.FunctionDef) -> None:
    """Asserts that a docstring has its arguments in order, and the result if there is one."""
    text = ast.get_docstring(function) or ""
    assert text, f"{name} has no docstring"
    if is_property(function):
        return
    documented = documented_arguments(text)
    assert documented == to_document(parameters(function), documented), name
    returns_none = function.returns is not None and ast.unparse(function.returns) == "None"
    assert returns_none or re.search("^Returns:$", text, re.MULTILINE), f"{name} has no Returns"


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields the functions of a module and the methods of its public classes, without a leading underscore."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for prefix, scope in [("", tree), *((f"{node.name}.", node) for node in classes)]:
        for node in scope.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield prefix + node.name, node


def is_property(function: ast.FunctionDef) -> bool:
    """Whether a method is read as an attribute, which its first line describes."""
    return any(ast.unparse(decorator) == "property" for decorator in function.decorator_list)


def parameters(function: ast.FunctionDef) -> list[str]:
    """The names of the parameters in order, without `self` and `cls`."""
    by_kind = function.args
    ordered = [*by_kind.posonlyargs, *by_kind.args, by_kind.vararg, *by_kind.kwonlyargs, by_kind.kwarg]
    return [argument.arg for argument in ordered if argument is not None and argument.arg not in ("self", "cls")]


def function_with_raise_documents_it(path: pathlib.Path, tree: ast.Module) -> Problems:
    scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
    for node in (node for scope in scopes for node in scope.body if isinstance(node, ast.FunctionDef)):
        documented = node.name.startswith("_") or re.search(r"\b[Rr]aise", ast.get_docstring(node) or "")
        if not documented and any(map(raises, node.body)):
            yield f"{node.name} raises"


def raises(node: ast.AST) -> bool:
    """Whether a statement raises an error that it neither catches nor turns into another, nor leaves to a subclass."""
    if isinstance(node, ast.Raise):
        return node.exc is not None and ast.unparse(node.exc) != "NotImplementedError"
    inner = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.Try)
    return not isinstance(node, inner) and any(map(raises, ast.iter_child_nodes(node)))


# Positional arguments that are not arrays: trees, paths and lengths that come first by their nature.
POSITIONAL = {
    "policy",
    "path",
    "abstract",
    "abstract_adapter",
    "abstract_params",
    "tree",
    "coef",  # the controllers' first argument
    "schedule",
    "reference",
    "params",
    *("average", "initial"),
    "sampling_logits",  # by lag
    "token_loss",
    "per_token",
    "length",
    "fill",
    "system",  # the lookups of the table of names
    "text",
    "name",
    *("array", "content", "error", "label", "leaf", "metadata", "problems", "restored", "sealed"),  # of checkpoints
}


def test_arrays_are_positional_and_options_keyword_only() -> None:
    for name in public_functions():
        for parameter in inspect.signature(thing_of(name)).parameters.values():
            kinds = (parameter.annotation, *typing.get_args(parameter.annotation))
            is_array = any(kind in (ArrayLike, Mask) for kind in kinds)
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                assert is_array or parameter.name in POSITIONAL, f"{name}: {parameter.name} should be keyword-only"
            else:
                assert parameter.kind is parameter.KEYWORD_ONLY, f"{name}: {parameter.name}"


def sections_are_indented_by_two(path: pathlib.Path, tree: ast.Module) -> Problems:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            sections = re.findall(
                r"^(Args|Attributes|Returns|Raises|Gradient):\n( *)\S", ast.get_docstring(node) or "", re.M
            )
            yield from (f"{section} is indented by {len(spaces)}" for section, spaces in sections if len(spaces) != 2)


def no_configuration_by_guessing(path: pathlib.Path, tree: ast.Module) -> Problems:
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        if called and len(node.args) == 3 and re.search("config|cfg", ast.unparse(node.args[0])):
            yield ast.unparse(node)


RULES: dict[Rule, list[pathlib.Path]] = {
    imports_go_one_way: [path for path in LIBRARY if topic(path) != "__init__"],
    library_imports_only_jax_and_numpy: LIBRARY,
    function_with_raise_documents_it: SOURCES,
    sections_are_indented_by_two: SOURCES,
    no_configuration_by_guessing: SOURCES,
}


@functools.cache
def problems() -> dict[Rule, list[str]]:
    return broken(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_has_no_exception_in_any_source(rule: Rule) -> None:
    assert not problems()[rule], "\n".join(problems()[rule])


def test_help_shows_arrays_by_name() -> None:
    text = pydoc.plain(pydoc.render_doc(kljax.token_weights))
    signature = text[: text.index("The weight of each token")]
    assert "mask: kljax.typing.Mask" in signature
    assert "kljax.typing.ArrayLike" in signature
    assert "ndarray" not in signature


def test_the_version_is_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kljax", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"kljax {kljax.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "kljax/__init__.py"
    assert (ROOT / "kljax" / "py.typed").is_file()
