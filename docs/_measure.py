"""Measures the house for `docs/architecture.md`: `python -m docs._measure` prints its tables."""

import ast
import pathlib
import statistics

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("kljax", "train", "benchmarks", "tests")


def lines_of(path: pathlib.Path) -> int:
    """Counts the lines of a file."""
    return len(path.read_text().splitlines())


def functions_of(path: pathlib.Path) -> list[tuple[int, str]]:
    """Lists the length, without its docstring, and the name of each function of a file."""
    sizes = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
            sizes.append(((node.end_lineno or 0) - node.lineno + 1 - docstring, node.name))
    return sizes


def sources(folder: str) -> list[pathlib.Path]:
    """Lists the Python files below a folder."""
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def modules() -> dict[str, pathlib.Path]:
    """Maps the modules of the trainer to their files."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources("train")
    }


def closure(module: str, known: dict[str, pathlib.Path]) -> set[str]:
    """Returns the modules of the trainer that importing a module loads."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in known or name in seen:
            continue
        seen.add(name)
        parts = name.split(".")
        waiting += [".".join(parts[:end]) for end in range(1, len(parts))]
        for node in ast.parse(known[name].read_text()).body:
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                waiting += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return seen - {"train"}


def size_table() -> list[str]:
    """Returns a table of files, lines and the longest function of each folder."""
    rows = ["| folder | files | lines | lines a file, median / max | longest function |", "|---|--:|--:|--:|---|"]
    inner = sorted(f"train/{path.name}" for path in (ROOT / "train").iterdir() if (path / "__init__.py").exists())
    for folder in (*FOLDERS[:2], *inner, *FOLDERS[2:]):
        files = sources(folder)
        counts = [lines_of(path) for path in files]
        size, name = max(item for path in files for item in functions_of(path))
        row = f"{len(files)} | {sum(counts):,} | {statistics.median(counts):.0f} / {max(counts)} | `{name}` {size}"
        rows.append(f"| `{folder}/` | {row} |")
    return rows


def closure_table() -> list[str]:
    """Returns a table of the modules that each module of the compute core loads."""
    known = modules()
    rows = ["| module | modules of `train/` that importing it loads |", "|---|--:|"]
    core = (name for name in known if name.startswith("train.rl."))
    return rows + [f"| `{name}` | {len(closure(name, known))} |" for name in core]


if __name__ == "__main__":
    print("\n".join([*size_table(), "", *closure_table()]))
