"""Reads the defaults of the systems' options from their source, without importing it.

`tests/goldens/plans/defaults.py` says where each default stands, as `file:name`. The forms of a name:

    Class.field                       a field of a class, or of a base class that the file imports
    function(argument)                the default of a parameter
    function[key]                     the value of a key in a dict of the function
    function.get(key)                 the second argument of `.get(key, default)`
    function if condition: name       a name that an `if` assigns; `if not condition` is its `else`
    --flag                            `add_argument("--flag", default=...)`; False for `action="store_true"` alone
    a.b.c                             in a YAML file: the value under these keys

`defaults.json` holds what stands there.
"""

import ast
import json
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.goldens import generate
from tests.goldens.plans.defaults import PLACES

FILE = pathlib.Path(__file__).resolve().parents[1] / "defaults.json"
NOTE = "the defaults of options, read from the source of the named release or commit; written by generate.py"


def read(root: pathlib.Path, place: str) -> Any:
    """Reads the default at a place of a release or a checkout; raises `LookupError` if nothing stands there."""
    file, _, name = place.partition(":")
    path = root / file
    if path.suffix == ".yaml":
        return _in_yaml(path, name)
    tree = ast.parse(path.read_text())
    for pattern, reader in _FORMS.items():
        if match := re.fullmatch(pattern, name):
            return _only([ast.literal_eval(node) for node in reader(tree, path, *match.groups())], place)
    raise LookupError(f"{place}: got {name!r}, expected one of the forms of a name")


def _only(values: list[Any], place: str) -> Any:
    """Returns the value that all occurrences share."""
    if not values or any(value != values[0] for value in values):
        raise LookupError(f"{place}: got {values}, expected one default")
    return values[0]


def _in_yaml(path: pathlib.Path, name: str) -> Any:
    import yaml  # generate.py installs it; the tests import this module without it

    value = yaml.safe_load(path.read_text())
    for key in name.split("."):
        value = value[key]
    return value


def _scope(tree: ast.AST, name: str) -> ast.AST:
    """Finds a class or function by its dotted name."""
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        named = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == part]
        if len(named) != 1:
            raise LookupError(f"{name}: got {len(named)} definitions of {part}, expected 1")
        tree = named[0]
    return tree


def _assigned(statements: list[ast.stmt], name: str) -> Iterator[ast.expr]:
    """Yields what statements assign to a name."""
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if value is not None and any(isinstance(target, ast.Name) and target.id == name for target in targets):
            yield value


def _field(tree: ast.Module, path: pathlib.Path, owner: str, name: str) -> Iterator[ast.expr]:
    """Yields the default of a field; an argument of `field(...)` or `Field(...)` holds it."""
    scope = _scope(tree, owner)
    assert isinstance(scope, ast.ClassDef)
    values = list(_assigned(scope.body, name))
    for value in values:
        if isinstance(value, ast.Call):
            keywords = {keyword.arg: keyword.value for keyword in value.keywords}
            if factory := keywords.get("default_factory"):
                assert isinstance(factory, ast.Lambda)
                yield factory.body
            else:
                yield keywords["default"] if "default" in keywords else value.args[0]
        else:
            yield value
    if not values:
        for base in scope.bases:
            yield from _inherited(tree, path, ast.unparse(base), name)


def _inherited(tree: ast.Module, path: pathlib.Path, base: str, name: str) -> Iterator[ast.expr]:
    """Yields the default of a field of a base class that is imported from a file beside this one."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level and base in [alias.name for alias in node.names]:
            file = path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")
            yield from _field(ast.parse(file.read_text()), file, base, name)


def _parameter(tree: ast.Module, _: pathlib.Path, owner: str, name: str) -> Iterator[ast.expr]:
    scope = _scope(tree, owner)
    assert isinstance(scope, ast.FunctionDef)
    positional = [*scope.args.posonlyargs, *scope.args.args]
    defaults = [None] * (len(positional) - len(scope.args.defaults)) + list(scope.args.defaults)
    pairs = [*zip(positional, defaults, strict=True), *zip(scope.args.kwonlyargs, scope.args.kw_defaults, strict=True)]
    yield from (default for argument, default in pairs if argument.arg == name and default is not None)


def _key(tree: ast.Module, _: pathlib.Path, owner: str, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(_scope(tree, owner)):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (value for key, value in pairs if isinstance(key, ast.Constant) and key.value == name)


def _calls(tree: ast.AST, method: str, name: str) -> Iterator[ast.Call]:
    """Yields the calls of a method that have a name as an argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            arguments = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if node.func.attr == method and name in arguments:
                yield node


def _get(tree: ast.Module, _: pathlib.Path, owner: str, name: str) -> Iterator[ast.expr]:
    yield from (call.args[1] for call in _calls(_scope(tree, owner), "get", name))


def _flag(tree: ast.Module, _: pathlib.Path, name: str) -> Iterator[ast.expr]:
    for call in _calls(tree, "add_argument", name):
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if "default" not in keywords and ast.unparse(keywords["action"]) == "'store_true'":
            yield ast.Constant(False)
        else:
            yield keywords["default"]


def _branch(tree: ast.Module, _: pathlib.Path, owner: str, no: str, condition: str, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(_scope(tree, owner)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == condition:
            yield from _assigned(node.orelse if no else node.body, name)


_FORMS: Mapping[str, Callable[..., Iterator[ast.expr]]] = {
    r"(--[\w.-]+)": _flag,
    r"([\w.]+)\.get\((\w+)\)": _get,
    r"([\w.]+)\((\w+)\)": _parameter,
    r"([\w.]+)\[(\w+)\]": _key,
    r"([\w.]+) if (not )?(\w+): (\w+)": _branch,
    r"([\w.]+)\.(\w+)": _field,
}


def defaults(root: pathlib.Path, system: str) -> dict[str, dict[str, Any]]:
    """Reads the place and value of every option of a system."""
    return {option: {"place": position, "value": read(root, position)} for option, position in PLACES[system].items()}


def commit_of(checkout: pathlib.Path) -> str:
    """Returns the commit that a checkout of git is at."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def recorded() -> dict[str, Any]:
    """Reads `defaults.json`: system -> version and options."""
    return json.loads(FILE.read_text())["systems"]


def sources(releases: pathlib.Path, checkouts: pathlib.Path | None) -> dict[str, tuple[str, pathlib.Path]]:
    """Finds the version and the directory of every system that can be read."""
    actual = {name: (version.replace("==", " "), releases / name) for name, version in generate.RELEASES.items()}
    for system, commit in generate.COMMITS.items() if checkouts else ():
        at = commit_of(checkouts / system)
        if not at.startswith(commit):
            raise ValueError(f"{checkouts / system}: got commit {at}, expected {commit}; check it out")
        actual[system] = f"commit {commit}", checkouts / system
    return actual


def write(releases: pathlib.Path, checkouts: pathlib.Path | None) -> None:
    """Writes `defaults.json`; systems without a checkout keep what it holds."""
    systems = recorded() if FILE.exists() else {}
    for system, (version, root) in sources(releases, checkouts).items():
        systems[system] = {"version": version, "options": defaults(root, system)}
    FILE.write_text(json.dumps({"note": NOTE, "systems": systems}, indent=1) + "\n")


def check(releases: pathlib.Path, checkouts: pathlib.Path | None) -> bool:
    """Reads the defaults again, prints how many agree with `defaults.json`, and returns whether all do."""
    print("defaults of options:")
    now, before = sources(releases, checkouts), recorded()
    agree = True
    for system in PLACES:
        if system not in now:
            print(f"  {system:9} not read: {generate.NOT_ON_PYPI[system]}; --checkouts reads it")
            continue
        version, root = now[system]
        read_now, options = defaults(root, system), before[system]["options"]
        differ = [name for name in {*read_now, *options} if read_now.get(name) != options.get(name)]
        print(f"  {system:9} {len(read_now) - len(differ):3} of {len(read_now):3} agree")
        for name in sorted(differ):
            print(f"      differs: {name}: {options.get(name)} recorded, {read_now.get(name)} in {version}")
        agree = agree and not differ and version == before[system]["version"]
    return agree
