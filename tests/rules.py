"""Rules of the source: each reads a parsed file and yields its problems; a file is parsed once for all rules."""

import ast
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping

ROOT = pathlib.Path(__file__).parents[1]
Problems = Iterator[str]
Rule = Callable[[pathlib.Path, ast.Module], Problems]


def relative(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def broken(rules: Mapping[Rule, Iterable[pathlib.Path]]) -> dict[Rule, list[str]]:
    """Returns `FILE: PROBLEM` for everything that breaks each rule, given the files that it is for."""
    rules_of: dict[pathlib.Path, list[Rule]] = {}
    for rule, paths in rules.items():
        for path in paths:
            rules_of.setdefault(path, []).append(rule)
    problems: dict[Rule, list[str]] = {rule: [] for rule in rules}
    for path, selected in rules_of.items():
        tree = ast.parse(path.read_text())
        for rule in selected:
            problems[rule] += (f"{relative(path)}: {problem}" for problem in rule(path, tree))
    return problems
