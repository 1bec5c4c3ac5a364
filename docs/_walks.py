"""Follows a value through the calls that take it, for `docs/architecture.md`.

    python -m docs._walks                                       prints the table of the page
    python -m docs._walks --write                               writes it there
    python -m docs._walks 'train.rl.step:make_update(plan)'     lists the functions of a walk

A walk begins at a parameter of a function and enters every function, in the order of the source, that is called with
the value, with an attribute of it, or as a method of it. It ends where a new value is made of it, unless this is the
config again, or the context that holds it. Functions are found by name: imports, classes, partial applications and
closures are followed, dynamic calls are not.
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = ("kljax", "train")
WALKS = (
    "kljax.kl:estimate_kl(log_probs)",
    "kljax.log_probs._api:log_probs_from_hidden(hidden)",
    "train.rollouts.sampler.engine:sample(prompts)",
    "train.rl.step:make_update(plan)",
    "train.references.load:load_reference(plan)",
    "train.run.programs:Programs.of(context)",
    "train.weights.orbax:RunCheckpoints.restore_last(like)",
    "train.run.run:run(loaded)",
)
HOLDERS = ("Config", "RunContext")
"""What holds the config of a run, by the annotation of the function that makes it."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A function or a class of a module."""

    module: str
    name: str
    node: ast.AST


class Walk(NamedTuple):
    """The functions that a value enters, in order, as `module:name`."""

    functions: list[str]

    @property
    def files(self) -> list[str]:
        """The module of each function."""
        return [function.partition(":")[0] for function in self.functions]

    @property
    def returns(self) -> int:
        """How often the walk comes back to a file that it had left."""
        files = self.files
        return sum(file in files[:index] and file != files[index - 1] for index, file in enumerate(files))


class House:
    """The modules of the repository, and what their names stand for."""

    def __init__(self, root: pathlib.Path = ROOT) -> None:
        paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
        modules = [".".join(path.relative_to(root).with_suffix("").parts) for path in paths]
        self.trees = {
            module.removesuffix(".__init__"): ast.parse(path.read_text())
            for module, path in zip(modules, paths, strict=True)
        }
        self.names = {module: _names(tree) for module, tree in self.trees.items()}
        self.methods: dict[str, list[Definition]] = {}
        for module, tree in self.trees.items():
            for node in tree.body:
                for item in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(item, Function):
                        method = Definition(module, f"{node.name}.{item.name}", item)
                        self.methods.setdefault(item.name, []).append(method)

    def definition(self, module: str, name: str) -> Definition | None:
        """Finds the function or class that a name of a module stands for; None outside the repository."""
        if f"{module}.{name}" in self.trees or module not in self.trees:
            return None
        entry = self.names[module].get(name)
        if isinstance(entry, tuple):
            return self.definition(*entry)
        return None if entry is None else Definition(module, name, entry)

    def called(self, caller: Definition, function: ast.expr) -> Definition | None:
        """Finds the function that an expression calls; a class stands for the function that makes its values."""
        module = caller.module
        target = None
        if isinstance(function, ast.Name):
            target = self.definition(module, function.id)
        elif ast.unparse(function).startswith(("self.", "cls.")) and isinstance(function, ast.Attribute):
            owner = self.definition(module, caller.name.partition(".")[0])
            target = None if owner is None else self.member(owner, function.attr)
        elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            source = self.names[module].get(function.value.id)
            if isinstance(source, tuple):
                path = ".".join(filter(None, source))
                target = self.definition(path if path in self.trees else source[0], function.attr)
                owner = self.definition(*source) if path not in self.trees else None
            else:
                owner = self.definition(module, function.value.id)
            if owner is not None and isinstance(owner.node, ast.ClassDef):
                target = self.member(owner, function.attr)
        if target is not None and isinstance(target.node, ast.ClassDef):
            return self.member(target, "__init__") or self.member(target, "__post_init__")
        return target

    def member(self, owner: Definition, name: str) -> Definition | None:
        """Finds a method of a class."""
        known = self.methods.get(name, [])
        return next((x for x in known if (x.module, x.name) == (owner.module, f"{owner.name}.{name}")), None)

    def walk(self, start: str) -> Walk:
        """Follows a value from `module:function(parameter)`."""
        module, _, rest = start.partition(":")
        name, _, parameter = rest.removesuffix(")").partition("(")
        owner, _, method = name.rpartition(".")
        first = self.definition(module, owner or name)
        if first is not None and owner:
            first = self.member(first, method)
        if first is None:
            raise LookupError(f"{start}: there is no such function")
        order: list[str] = []
        self._enter(first, frozenset({parameter}), order, set())
        return Walk(order)

    def _enter(self, function: Definition, values: frozenset[str], order: list[str], seen: set[object]) -> None:
        key = f"{function.module}:{function.name}"
        if (key, values) in seen:
            return
        seen.add((key, values))
        if key not in order:
            order.append(key)
        carriers = set(values)
        for node in _in_order(function.node):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    carriers |= set(_aliases(target, node.value, carriers))
                    if isinstance(target, ast.Name) and self._holds(function, node.value, carriers):
                        carriers.add(target.id)
            elif isinstance(node, ast.Call):
                self._call(function, node, carriers, order, seen)

    def _holds(self, caller: Definition, value: ast.expr, carriers: set[str]) -> bool:
        """Whether a call in an expression makes a holder of the value."""
        for call in ast.walk(value):
            if isinstance(call, ast.Call) and any(_carries(argument, carriers) for argument in call.args):
                target = self.called(caller, call.func)
                returns = None if target is None else getattr(target.node, "returns", None)
                if returns is not None and ast.unparse(returns).strip("'") in HOLDERS:
                    return True
        return False

    def _call(
        self, caller: Definition, call: ast.Call, carriers: set[str], order: list[str], seen: set[object]
    ) -> None:
        function, positional = call.func, call.args
        if ast.unparse(function) in ("functools.partial", "partial", "jax.tree.map") and positional:
            function = positional[0]
            positional = positional[1:]
        target = self.called(caller, function)
        receiver = isinstance(function, ast.Attribute) and _carries(function.value, carriers)
        if target is None and receiver and isinstance(function, ast.Attribute):
            known = self.methods.get(function.attr, [])
            target = known[0] if len(known) == 1 else None
        if target is None or not isinstance(target.node, Function):
            return
        names = [x.arg for x in (*target.node.args.posonlyargs, *target.node.args.args)]
        bound = names[1:] if names[:1] in (["self"], ["cls"]) else names
        entered = {name for name, value in zip(bound, positional, strict=False) if _carries(value, carriers)}
        entered |= {word.arg for word in call.keywords if word.arg and _carries(word.value, carriers)}
        if receiver and names[:1] == ["self"]:
            entered.add("self")
        if entered:
            self._enter(target, frozenset(entered), order, seen)


def _names(tree: ast.Module) -> dict[str, ast.AST | tuple[str, str]]:
    """Maps the names of a module to their definitions, or to the module and the name of an import."""
    names: dict[str, ast.AST | tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
    return names | {x.name: x for x in tree.body if isinstance(x, Function | ast.ClassDef)}


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes below one, calls after their arguments."""
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
        yield child


def _carries(node: ast.expr, carriers: set[str]) -> bool:
    """Tells whether an expression is the value or an attribute of it."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in carriers


def _aliases(target: ast.expr, value: ast.expr, carriers: set[str]) -> Iterator[str]:
    """Yields the names that an assignment gives to the value."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for part, item in zip(target.elts, value.elts, strict=False):
            yield from _aliases(part, item, carriers)
    elif isinstance(target, ast.Name) and _carries(value, carriers):
        yield target.id


def walk_table(house: House) -> list[str]:
    """Returns a table of the walks."""
    rows = ["| walk | functions | files | returns |", "|---|--:|--:|--:|"]
    for start in WALKS:
        walk = house.walk(start)
        counts = f"{len(walk.functions)} | {len(set(walk.files))} | {walk.returns}"
        rows.append(f"| `{start.partition(':')[2]}` | {counts} |")
    return rows


def write_table(page: pathlib.Path, table: list[str]) -> None:
    """Puts the table in the place of that of the page."""
    text = page.read_text()
    page.write_text(re.sub(rf"^{re.escape(table[0])}\n(?:\|.*\n)+", "\n".join([*table, ""]), text, flags=re.MULTILINE))


if __name__ == "__main__":
    house = House()
    starts = sys.argv[1:]
    if starts == ["--write"]:
        write_table(PAGE, walk_table(house))
    elif starts:
        print("\n".join(name for start in starts for name in house.walk(start).functions))
    else:
        print("\n".join(walk_table(house)))
