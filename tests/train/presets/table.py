"""`python -m tests.train.presets.table [PRESET ...] [--write]`: proves presets; writes the table of docs/presets.md."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.train.presets import proof
from train.config.presets import preset_names

PAGE = Path(__file__).resolve().parents[3] / "docs" / "presets.md"
BEGIN, END = "<!-- presets: begin -->", "<!-- presets: end -->"
HEADER = ["| preset | of | proof | loss | gradient | accumulation |", "|---|---|---|---|---|---|"]


def rows(names: list[str]) -> Iterator[str]:
    """Yields a row of the table for each preset."""
    for name in names:
        if name not in proof.recorded_presets():
            yield f"| `{name}` | | not recorded | | | |"
            continue
        index, _ = proof.recording(name.partition("/")[0])
        (result,) = proof.prove(name)
        changes = f"{result.accumulation:.0%}" if result.accumulation > 1e-9 else "same"
        distances = f"{result.loss:.0e} | {result.gradient:.0e}"
        yield f"| `{name}` | {index['version']} | {result.dtype} | {distances} | {changes} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and writes it into the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.train.presets.table", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET")
    parser.add_argument("--write", action="store_true", help="write the table into docs/presets.md; all presets")
    options = parser.parse_args(arguments)
    lines = list(HEADER)
    print("\n".join(HEADER))
    for row in rows(options.presets or list(preset_names())):
        lines.append(row)
        print(row, flush=True)
    if options.write and not options.presets:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
