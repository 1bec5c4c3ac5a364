"""`python -m tests.train.presets.table [PRESET ...] [--write]`: proves presets; writes the table of docs/presets.md."""

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.train.presets import proof
from train.config.presets import preset_names

PAGE = Path(__file__).resolve().parents[3] / "docs" / "presets.md"
BEGIN, END = "<!-- presets: begin -->", "<!-- presets: end -->"
HEADER = ["| preset | difference | accumulation |", "|---|---|---|"]


def rows(names: list[str]) -> Iterator[str]:
    """Yields a row of the table for each preset."""
    for name in names:
        if name not in proof.recorded_presets():
            yield f"| `{name}` | not recorded | |"
            continue
        (result,) = proof.prove(name)
        dtype = "" if result.dtype == "float64" else f" ({result.dtype})"
        changes = f"{result.accumulation:.0%}" if result.accumulation > 1e-9 else "same"
        yield f"| `{name}` | {max(result.loss, result.gradient):.0e}{dtype} | {changes} |"


def versions(names: list[str]) -> str:
    """Names the recorded version of each system."""
    systems = sorted({name.partition("/")[0] for name in names if name in proof.recorded_presets()})
    text = f"Recorded: {', '.join(proof.recording(system)[0]['version'] for system in systems)}."
    return textwrap.fill(text, width=100, break_on_hyphens=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and writes it into the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.train.presets.table", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET")
    parser.add_argument("--write", action="store_true", help="write the table into docs/presets.md; all presets")
    options = parser.parse_args(arguments)
    names = options.presets or list(preset_names())
    lines = [versions(names), "", *HEADER]
    print("\n".join(lines))
    for row in rows(names):
        lines.append(row)
        print(row, flush=True)
    if options.write and not options.presets:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
