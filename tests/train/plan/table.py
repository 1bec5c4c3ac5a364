"""`python -m tests.train.plan.table [--write]`: plans the recipes of 8B models for docs/planning.md."""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import environments
from benchmarks.suites import compiler

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- plans: begin -->", "<!-- plans: end -->"
RECIPES = {"gsm8k_qwen3_8b_v5p64": "v5p:4x4x4", "math_llama3_8b_h100x8": "h100:8"}
HOURS = 2


def plan(name: str, topology: str) -> str:
    """Plans a recipe in the environment of the compilers, and returns its section of the page.

    Raises:
      RuntimeError: the command fails; a recipe that does not fit is none.
    """
    arguments = [f"configs/{name}.yaml", "--topology", topology]
    python = environments.interpreter(compiler.DEFAULT)
    with tempfile.NamedTemporaryFile(suffix=".md") as file:
        command = [str(python), "-m", "train.plan", *arguments, "--markdown", file.name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HOURS * 3600)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        # The verdict, the memory and the work fill the page; all else is for the reader of one plan.
        summary, title, tables = Path(file.name).read_text().partition("**Memory of")
    said = [line.strip() for line in summary.split("\n- ") if line.startswith(("fits", "does not fit", "a step takes"))]
    shell = f"```sh\npython -m train.plan {' '.join(arguments)}\n```"
    memory, work = title + tables.partition("**Work of")[0], tables.partition("**Work of")[2]
    # The last column is how long this machine compiled.
    columns = re.sub(r" [^|\n]*\|$|---\|$", "", work.partition("**Collectives of")[0].rstrip(), flags=re.MULTILINE)
    shown = f"{memory}**Work of{columns}\n"
    return "\n\n".join((f"### `configs/{name}.yaml` on {topology}", shell, "\n".join(f"- {x}" for x in said), shown))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the sections, and writes them into the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.train.plan.table", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/planning.md")
    options = parser.parse_args(arguments)
    sections = [plan(name, topology) for name, topology in RECIPES.items()]
    print("\n".join(sections))
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text("\n".join([before + BEGIN, "", *sections, END + after]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
