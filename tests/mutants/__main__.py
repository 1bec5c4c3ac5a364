"""Plants each fault of `mutants.json` in a copy of the checkout, and runs the tests until one fails.

    python -m tests.mutants [--only NUMBER ...] [--results FILE] [--rows] [--measured FOLDER]

The tests in the row of the module (`docs/contributing/tests.md`) come first, as the likeliest to notice it, with those
of all public functions if it is of the library; then all of `make test`, then what `make test-all` has besides. With
`--results` a file of earlier results is continued; with `--rows` the tests of the row are all, and what they overlook
is left for a call without it. With `--measured` those come first that reach the changed lines, by what `make
measure-tests` wrote, in place of those of all public functions. A fault that the tests of `make test` overlook, but not
those of `make test-all`, stands for a statement that has lost its test.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.programs import VARIABLE
from tests.tiers.measured import tests_reaching

ROOT = Path(__file__).parents[2]
MUTANTS: list[dict[str, str]] = json.loads(Path(__file__).with_name("mutants.json").read_text())
# What sees every public function of the library.
PROPERTIES = ("everywhere", "split_invariance", "masks", "rows", "precision", "systems", "devices")
SWEEPS = [f"tests/kljax/test_{name}.py" for name in PROPERTIES]
QUICK = "not thorough and not more"
MORE = "more and not thorough"
ELSEWHERE = re.findall(r"[\w/]+_(?:aot_)?plans(?:_aot)?\.py", (ROOT / "Makefile").read_text())


def tests_of(file: str) -> list[str]:
    """Returns the tests in the row of a module."""
    for line in (ROOT / "docs/contributing/tests.md").read_text().splitlines():
        cells = line.split("|")
        if len(cells) > 2 and any(f"{file}/".startswith(f"{path}/") for path in re.findall("`(.+?)`", cells[1])):
            paths = re.findall("`((?:tests|kljax)/.+?)`", cells[2])
            return [path for path in paths if not any(x in path for x in ("real", "integrations", "reasoning_gym"))]
    return []


def first_failure(root: Path, marks: str, paths: list[str]) -> str:
    """Runs tests until one fails, and returns its name; empty if all pass."""
    # A second process imports everything again.
    workers = "0" if any(path.startswith("@") for path in paths) else "2"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", workers, "--dist", "worksteal", "-m", marks, *paths]
    command += [f"--deselect=tests/{name}" for name in (*ELSEWHERE, "integration/test_wheel.py")]
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPYCACHEPREFIX": str(root / ".bytecode")}
    own[VARIABLE] = str(ROOT / ".venv/programs")
    environment = os.environ | own
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode in (0, 5):
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - |$)", done.stdout, re.M)
    return found[1] if found else done.stdout[-300:]


def plant(root: Path, mutant: dict[str, str], *, only_row: bool, measured: Path | None) -> dict[str, Any] | None:
    """Plants one fault, says what noticed it, and takes it away; None where only its row was tried in vain."""
    file = root / mutant["file"]
    text = file.read_text()
    if text.count(mutant["old"]) != 1:
        return {"noticed by": "not planted: the source has changed"}
    file.write_text(text.replace(mutant["old"], mutant["new"]))
    try:
        row = [path for path in tests_of(mutant["file"]) if (root / path).exists()]
        first = text[: text.index(mutant["old"])].count("\n") + 1
        lines = range(first, first + mutant["old"].rstrip("\n").count("\n") + 1)
        reached = tests_reaching(measured, mutant["file"], lines) if measured else []
        # The order of the tests is that of the file.
        listed = root / "reaching.txt"
        listed.write_text("\n".join(sorted(reached, key=lambda test: not test.startswith(tuple(row)))))
        if not reached and mutant["file"].startswith("kljax/"):
            row += SWEEPS
        # Nobody waits for all tests where only those of the row are asked for.
        parts = [[f"@{listed}"]] * bool(reached) + [row] + [[]] * (not only_row)
        for name, marks in (("test", QUICK), ("test-all", MORE))[: 1 if only_row else None]:
            for paths in parts:
                failed = first_failure(root, marks, paths)
                if failed:
                    return {"noticed by": name, "first failure": failed}
        return None if only_row else {"noticed by": "none"}
    finally:
        file.write_text(text)


def main() -> None:
    """Plants the faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of faults, from 0")
    parser.add_argument("--results", type=Path, help="JSON file of results, continued if it is there")
    parser.add_argument("--rows", action="store_true", help="run the tests in the row of the module alone")
    parser.add_argument("--measured", type=Path, help="folder that make measure-tests wrote")
    given = parser.parse_args()
    results = json.loads(given.results.read_text()) if given.results and given.results.exists() else {}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "kljax"
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in files.split("\0")[:-1]:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
        for number in given.only or range(len(MUTANTS)):
            mutant = MUTANTS[number]
            if mutant["what"] not in results:
                result = plant(root, mutant, only_row=given.rows, measured=given.measured)
                print(f"{number:3d} {mutant['file']}: {mutant['what']}: {result}", flush=True)
                if result:
                    results[mutant["what"]] = result
                if given.results:
                    given.results.write_text(json.dumps(results, indent=1) + "\n")
    for name in ("test", "test-all", "none"):
        print(name, sum(result["noticed by"] == name for result in results.values()))


if __name__ == "__main__":
    main()
