"""`python -m tests.train.plan.table [NAMES] [--write | --check]`: the figures of pages that compilers plan.

Names: `plans`, the recipes of 8B models in docs/planning.md; `experts`, an axis of experts in docs/moe.md; `roofline`,
the programs of docs/accelerators.md, and `attention`, its long rows. Without names all of them, in half an hour on two
cores. `--check` fails if a page has other figures. Needs `make .venv-aot/.ready`.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import environments
from benchmarks.suites import compiler

ROOT = Path(__file__).resolve().parents[3]
RECIPES = {"gsm8k_qwen3_8b_v5p64": "v5p:4x4x4", "math_llama3_8b_h100x8": "h100:8"}
HOURS = 2
STALE = 1
"""The exit code of --check if a page has other figures."""


class Figures(NamedTuple):
    """A part of a page between two comments with its name, and what makes it."""

    page: str
    make: Callable[[], str]


def run_python(*arguments: str, allowed: tuple[int, ...] = (0,)) -> str:
    """Runs a module in the environment of the compilers, and returns its output; raises `RuntimeError` if it fails."""
    command = [str(environments.interpreter(compiler.DEFAULT)), "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HOURS * 3600)
    if done.returncode not in allowed:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def plan(name: str, topology: str) -> str:
    """Plans a recipe, and returns its section of the page.

    Raises:
      RuntimeError: the command fails; a recipe that does not fit is none.
    """
    arguments = [f"configs/{name}.yaml", "--topology", topology]
    with tempfile.NamedTemporaryFile(suffix=".md") as file:
        run_python("train.plan", *arguments, "--markdown", file.name, allowed=(0, 1))
        # The verdict, the memory and the work fill the page; all else is for the reader of one plan.
        summary, title, tables = Path(file.name).read_text().partition("**Memory of")
    wanted = ("fits", "does not fit", "a step takes", "model.remat")
    said = [line.strip() for line in summary.removeprefix("- ").split("\n- ") if line.startswith(wanted)]
    shell = f"```sh\npython -m train.plan {' '.join(arguments)}\n```"
    memory, work = title + tables.partition("**Work of")[0], tables.partition("**Work of")[2]
    # The last column is how long this machine compiled.
    columns = re.sub(r" [^|\n]*\|$|---\|$", "", work.partition("**Collectives of")[0].rstrip(), flags=re.MULTILINE)
    shown = f"{memory}**Work of{columns}\n"
    return "\n\n".join((f"### `configs/{name}.yaml` on {topology}", shell, "\n".join(f"- {x}" for x in said), shown))


def recipes() -> str:
    """Returns the plans of all recipes."""
    return "\n".join(plan(name, topology) for name, topology in RECIPES.items())


def experts() -> str:
    """Returns the table of gathered and of exchanged tokens."""
    # Imported late: it loads JAX.
    from tests.train.models.plan_expert_axis import table

    return table() + "\n"


def roofline() -> str:
    """Returns the table of programs on one GPU."""
    return run_python("benchmarks.roofline")


def attention() -> str:
    """Returns the table of attention over long rows."""
    return run_python("benchmarks.attention_aot")


FIGURES = {
    "plans": Figures("planning.md", recipes),
    "experts": Figures("moe.md", experts),
    "roofline": Figures("accelerators.md", roofline),
    "attention": Figures("accelerators.md", attention),
}


def replace(text: str, name: str, figures: str) -> str:
    """Puts figures between the comments of their name in the text of a page.

    Raises:
      RuntimeError: the page has no such comments.
    """
    begin, end = (f"<!-- {name}: {word} -->" for word in ("begin", "end"))
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise RuntimeError(f"{name}: the page has no {begin} with {end} behind it")
    return f"{before}{begin}\n\n{figures}\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures; writes or compares those of the pages if asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.train.plan.table", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAMES", help=f"out of {', '.join(FIGURES)}")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="write the figures into the pages")
    action.add_argument("--check", action="store_true", help="fail if a page has other figures")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - FIGURES.keys()):
        parser.error(f"NAMES: got {', '.join(unknown)}, expected some of {', '.join(FIGURES)}")
    stale = []
    for name in options.names or FIGURES:
        page = ROOT / "docs" / FIGURES[name].page
        figures = FIGURES[name].make()
        print(figures, flush=True)
        before = page.read_text()
        after = replace(before, name, figures)
        if options.write:
            page.write_text(after)
        elif options.check and after != before:
            stale.append(f"docs/{FIGURES[name].page}")
    for page_name in stale:
        print(f"error: {page_name} has other figures; run python -m tests.train.plan.table --write", file=sys.stderr)
    return STALE if stale else 0


if __name__ == "__main__":
    sys.exit(main())
