"""`python -m tests.train.presets.table [PRESET ...] [--write]`: proves presets; writes the table of docs/presets.md."""

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.train.presets import proof
from train.config.presets import preset_names

PAGE = Path(__file__).resolve().parents[3] / "docs" / "presets.md"
BEGIN, END = "<!-- presets: begin -->", "<!-- presets: end -->"
HEADER = ["| recorded | presets | difference | accumulation |", "|---|---|---|---|"]


def proofs(names: Sequence[str]) -> Iterator[tuple[str, proof.Proof]]:
    """Yields the proof of each preset, and prints its numbers."""
    for name in names:
        (result,) = proof.prove(name)
        difference = max(result.loss, result.gradient)
        print(f"{name:<30} {difference:.0e} ({result.dtype})  {result.accumulation:.0%}", flush=True)
        yield name, result


def rows(results: Mapping[str, proof.Proof]) -> Iterator[str]:
    """Yields a row of the table for each system: its presets, and the largest numbers of them."""
    for system, names in itertools.groupby(sorted(results), lambda name: name.partition("/")[0]):
        presets = {name: results[name] for name in names}
        difference = max(max(result.loss, result.gradient) for result in presets.values())
        shares = sorted(result.accumulation for result in presets.values())
        changes = f"{shares[0] * 100:.0f} to {shares[-1]:.0%}" if shares[-1] > 1e-9 else "same"
        version, listed = proof.recording(system)[0]["version"], ", ".join(f"`{name}`" for name in presets)
        yield f"| {version} | {listed} | {difference:.0e} | {changes} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the numbers of each preset and the table, and writes the table into the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.train.presets.table", description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET")
    parser.add_argument("--write", action="store_true", help="write the table into docs/presets.md; all presets")
    options = parser.parse_args(arguments)
    names = options.presets or list(preset_names())
    lines = [*HEADER, *rows(dict(proofs(names)))]
    print("\n".join(lines))
    if options.write and not options.presets:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
