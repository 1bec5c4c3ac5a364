"""Functions by name: their signatures, read from the source, and their import.

A config is checked by signatures alone, without importing JAX or the library.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Optional, Union, get_args

REQUIRED: Any = inspect.Parameter.empty
"""The default of a parameter without one."""
PLAIN: Mapping[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}
# A number that may also be an array: in a config it is a number. Optax annotates all its hyperparameters like this.
NUMBERS = ("Scalar", "ScalarOrSchedule")
OPTAX_NUMBERS = (*NUMBERS, "ArrayLike")
UNIONS = ("Optional", "Union")
ENTRY = re.compile(r"(\w+)(?: \(.*?\))?:\s*(.*)")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function.

    Attributes:
      name: its name.
      keyword: whether it is keyword-only.
      type: its type in a config, such as `float | None` or a `Literal`; None for arrays and everything else that a
        config cannot hold.
      default: its default, `REQUIRED` without one; None for defaults that are no literal.
      doc: its entry in the docstring.
      shape: the shape of an array, such as "*b T"; "" if the annotation has none.
    """

    name: str
    keyword: bool
    type: Any
    default: Any
    doc: str
    shape: str = ""

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is REQUIRED


@dataclass(frozen=True)
class Signature:
    """A function as its source declares it.

    Attributes:
      target: `module:function`, or `path/to/file.py:function`.
      doc: the first line of its docstring.
      parameters: positional parameters first, as declared.
      returns: the kind of array that it returns, "Float" or "Bool"; "" if the annotation does not say so.
      is_coroutine: whether it is defined by `async def`.
    """

    target: str
    doc: str
    parameters: tuple[Parameter, ...]
    returns: str = ""
    is_coroutine: bool = False

    def __contains__(self, name: str) -> bool:
        """Whether there is a parameter of this name."""
        return any(parameter.name == name for parameter in self.parameters)


@dataclass(frozen=True)
class Module:
    """The parsed source of a module and the names that it defines or imports at its top level."""

    name: str
    path: Path
    definitions: Mapping[str, ast.AST]

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def read_signature(target: str, *, coroutines: bool = False) -> Signature:
    """Reads the signature of `module:function` or `path/to/file.py:function`; names are followed through imports.

    Args:
      target: the function.
      coroutines: whether it may be defined by `async def`.

    Raises:
      LookupError: there is no such module or function, with the reason.
    """
    source, _, name = target.rpartition(":")
    # Another working directory has other files.
    signature = _read_signature(target, os.path.abspath(source) if source.endswith(".py") else source, name)
    if signature.is_coroutine and not coroutines:
        raise LookupError(f"{source} has no function {name!r} that is defined by `def`")
    return signature


@cache
def _read_signature(target: str, source: str, name: str) -> Signature:
    module, node = _find(_module(source), name)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise LookupError(f"{source} has no function {name!r} that is defined by `def`")
    doc = ast.get_docstring(node) or ""
    helps = _argument_docs(doc)
    parameters = tuple(
        Parameter(
            name=argument.arg,
            keyword=keyword,
            type=_with_kind_of(_resolve(argument.annotation, module), default),
            default=default,
            doc=helps.get(argument.arg, ""),
            shape=_shape(argument.annotation),
        )
        for argument, keyword, default in _arguments(node.args)
    )
    is_coroutine = isinstance(node, ast.AsyncFunctionDef)
    return Signature(target, doc.partition("\n")[0].strip(), parameters, _kind(node.returns), is_coroutine)


def find_definition(target: str) -> None:
    """Checks that the source of a module or file has a name, as `module:Name`, without importing it.

    Raises:
      LookupError: there is no such module or name, with the reason.
    """
    source, _, name = target.rpartition(":")
    module = _module(os.path.abspath(source) if source.endswith(".py") else source)
    # It may be bound in any way, or by an import of all names.
    if not re.search(rf"\b({name}|__getattr__)\b|import \*", module.path.read_text(encoding="utf-8")):
        raise LookupError(f"{source} has no {name!r}")


def read_choices(module: str, name: str) -> Any:
    """Reads the `Literal` that a module assigns to a name; raises LookupError if there is none."""
    source, node = _find(_module(module), name)
    return _resolve(node, source)


def load_function(target: str) -> Callable[..., Any]:
    """Imports `module:function` or `path/to/file.py:function`; a file runs once in a command, even if it is edited.

    Raises:
      ModuleNotFoundError: there is no such module or file. Errors of the imported code pass through.
      AttributeError: the module has no such function.
    """
    source, _, name = target.rpartition(":")
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), name)
    return getattr(_load_file(os.path.abspath(source)), name)


@cache
def _load_file(path: str) -> types.ModuleType:
    """Imports a file once: its functions share a module, and all programs of a run have those of its start."""
    if not os.path.isfile(path):
        raise ModuleNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Another module of this name stays.
    if getattr(sys.modules.get(spec.name), "__file__", path) == path:
        sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def forget_signatures() -> None:
    """Forgets signatures and files, which are then read anew: a notebook may have edited one."""
    _read_signature.cache_clear()
    _module.cache_clear()
    _load_file.cache_clear()


def _arguments(arguments: ast.arguments) -> Iterator[tuple[ast.arg, bool, Any]]:
    """Yields each parameter, whether it is keyword-only, and its default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    for number, argument in enumerate(positional):
        yield argument, False, REQUIRED if number < without else _literal(arguments.defaults[number - without])
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument, True, REQUIRED if default is None else _literal(default)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _with_kind_of(annotation: Any, default: Any) -> Any:
    """Narrows a number to an integer if its default is one: a count that is annotated as a scalar."""
    if type(default) is int and annotation is float:
        return int
    return annotation


def _shape(annotation: ast.expr | None) -> str:
    """Returns the shape in `Float[ArrayLike, "*b T"]`."""
    if not isinstance(annotation, ast.Subscript) or _last_name(annotation.value) == "Literal":
        return ""
    if isinstance(annotation.slice, ast.Tuple):
        last = annotation.slice.elts[-1]
        return last.value.strip() if isinstance(last, ast.Constant) and isinstance(last.value, str) else ""
    return ""


def _kind(annotation: ast.expr | None) -> str:
    """Returns the kind of array in `Float[Array, "*b T"]`."""
    return _last_name(annotation.value) if isinstance(annotation, ast.Subscript) else ""


def _resolve(node: ast.AST | None, module: Module) -> Any:
    """Converts an annotation to the type of a config field; None if a config cannot hold it."""
    if isinstance(node, ast.BinOp):
        return _union([_resolve_member(part, module) for part in (node.left, node.right)])
    if isinstance(node, ast.Subscript):
        return _resolve_subscript(node, module)
    name = _last_name(node)
    if name in (OPTAX_NUMBERS if module.name.startswith("optax") else NUMBERS):
        return float
    return PLAIN.get(name) or _resolve_alias(node, module)


def _resolve_alias(node: ast.AST | None, module: Module) -> Any:
    if not isinstance(node, ast.Name):
        return None
    try:
        source, defined = _find(module, node.id)
    except LookupError:  # made in another way than the aliases of plain types are
        return None
    return _resolve(defined, source) if isinstance(defined, ast.expr) else None


def _resolve_subscript(node: ast.Subscript, module: Module) -> Any:
    name = _last_name(node.value)
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Literal":
        return Literal[tuple(choice for part in parts for choice in _choices(part, module))]
    if name in UNIONS:
        members = [_resolve_member(part, module) for part in parts]
        return _union([*members, types.NoneType] if name == "Optional" else members)
    return None


def _resolve_member(node: ast.expr, module: Module) -> Any:
    return types.NoneType if isinstance(node, ast.Constant) and node.value is None else _resolve(node, module)


def _union(members: list[Any]) -> Any:
    """Joins the members that a config can hold; an array beside them makes the whole no field."""
    if None in members or all(member is types.NoneType for member in members):
        return None
    return Optional[members[0]] if members[1:] == [types.NoneType] else Union[tuple(members)]  # noqa: UP007, UP045


def _choices(node: ast.expr, module: Module) -> tuple[Any, ...]:
    """Lists the entries of a `Literal`, into which the entries of another one may be spread by its name."""
    if isinstance(node, ast.Constant):
        return (node.value,)
    return get_args(_resolve(node, module))


def _last_name(node: ast.AST | None) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _find(module: Module, name: str) -> tuple[Module, ast.AST]:
    """Finds the definition of a name, through the modules that it is imported from."""
    node = module.definitions.get(name)
    if node is None:
        raise LookupError(f"{module.name} has no function {name!r}")
    if not isinstance(node, ast.ImportFrom):
        return module, node
    parts = module.package.split(".")
    start = parts[: len(parts) - node.level + 1] if node.level else []
    source = ".".join([*start, *([node.module] if node.module else [])])
    original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    return _find(_module(source), original)


@cache
def _module(name: str) -> Module:
    path = Path(name) if name.endswith(".py") else source_of(name)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LookupError(f"cannot read {path}: {error.strerror}") from None
    except SyntaxError as error:
        raise LookupError(f"{path}, line {error.lineno}: {error.msg}") from None
    definitions: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            definitions |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign):
            definitions |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    return Module(name, path, definitions)


def source_of(name: str) -> Path:
    """Finds the file of a module without importing it or the packages around it; raises LookupError without one."""
    root, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(root) if root else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise LookupError(f"there is no module {root!r}")
    if not inner and spec.origin is not None:
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*inner)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    raise LookupError(f"there is no module {name!r}")


def _argument_docs(doc: str) -> dict[str, str]:
    """Reads the entries below `Args:` of a docstring, each joined to one line."""
    lines = iter(doc.splitlines())
    entries: dict[str, str] = {}
    if not any(line.strip() == "Args:" for line in lines):
        return entries
    indent = 0
    name = ""
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if depth == 0:
            break
        indent = indent or depth
        match = ENTRY.fullmatch(line.strip()) if depth == indent else None
        if match:
            name = match[1]
            entries[name] = match[2]
        elif name:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return entries
