"""Measures the house for `docs/architecture.md`: `python -m docs._measure` prints its tables."""

import ast
import math
import pathlib
import statistics

ROOT = pathlib.Path(__file__).parents[1]
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
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


def code_and_docstrings(path: pathlib.Path) -> tuple[int, int]:
    """Counts the lines of a file that hold code, and the lines of its docstrings; blanks and comments are neither."""
    text = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = [line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in documented]
    return sum(bool(line) and not line.startswith("#") for line in lines), len(documented)


def percentile(counts: list[int], share: float) -> int:
    """Returns the number of lines that this share of the files does not exceed."""
    return sorted(counts)[math.ceil(share * len(counts)) - 1]


def weight_table() -> list[str]:
    """Returns a table of files, lines, code and docstrings of the folders."""
    title = "| folder | files | lines | code / docstrings | lines a file, 50 % / 90 % / all |"
    rows = [title, "|---|--:|--:|--:|--:|"]
    for folder in FOLDERS:
        files = sources(folder)
        code, documented = map(sum, zip(*map(code_and_docstrings, files), strict=True))
        counts = [lines_of(path) for path in files]
        quantiles = " / ".join(str(percentile(counts, share)) for share in (0.5, 0.9, 1))
        rows.append(f"| `{folder}/` | {len(files)} | {sum(counts):,} | {code:,} / {documented:,} | {quantiles} |")
    return rows


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
    """Returns a table of files, lines and the longest function of each folder of the trainer."""
    rows = ["| folder | files | lines | lines a file, median / max | longest function |", "|---|--:|--:|--:|---|"]
    inner = sorted(f"train/{path.name}" for path in (ROOT / "train").iterdir() if (path / "__init__.py").exists())
    for folder in inner:
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
    print("\n".join([*weight_table(), "", *size_table(), "", *closure_table()]))
