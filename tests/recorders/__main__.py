"""Runs the recorders of docs/parity.md and docs/replay.md around the newest TRL and verl, and kljax on what they left.

    python -m tests.recorders --torch-env ENV   # `make test-recorders`; with --mistakes, what the mistakes are called

The environment has torch, the newest trl, and verl without its dependencies. Each package makes a dump with its
defaults, and one of the second update of a batch, in which ratios have to differ from 1; and a recording, whose replay
has to have the losses, KLs and weights of TRL, and the advantages of verl.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np

from kljax.tools.parity.command import compare
from kljax.tools.parity.report import as_text
from tests.recorders import replay, score

SIDES = ("trl_side", "trl_replay", "verl_side", "verl_replay")
# A ratio this far from 1 in the second update of a batch; in the first one all are 1.
MOVED = 1e-2


def problems_of(path: pathlib.Path) -> list[str]:
    """Lists what is wrong with a dump: nothing compared, a difference, or ratios that show nothing."""
    with jax.enable_x64(True):
        report = compare(path)
    print(f"-- {path.stem}\n{as_text(report)}", flush=True)
    fields = {difference.field for difference in report.differences if difference.compared}
    problems = [] if report.agrees else ["differs"]
    # verl's trainer and its workers are processes of their own, each with a dump.
    wanted = "advantages" if path.stem == "verl-advantages" else "grad_log_probs"
    problems += [f"{wanted} is not compared"] if wanted not in fields else []
    with np.load(path) as arrays:
        mask = arrays["mask"] > 0
        log_ratios = (arrays["log_probs"] - arrays.get("old_log_probs", arrays["log_probs"]))[mask]
    moved = float(np.abs(np.expm1(log_ratios)).max())
    if "second" in path.stem and moved < MOVED:
        problems.append(f"its ratios are within {moved:.1e} of 1")
    return [f"{path.stem}: {problem}" for problem in problems]


def main() -> int:
    """Runs all sides; returns 1 if a recorder fails, or a dump or a recording is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-env", type=pathlib.Path, required=True, help="an environment with torch, trl and verl")
    parser.add_argument("--only", default="", help="sides that start so, as trl or verl_side; all by default")
    parser.add_argument("--mistakes", action="store_true", help="judge runs with a mistake in TRL's source; 10 minutes")
    options = parser.parse_args()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        sides = ("trl_mistakes",) if options.mistakes else [side for side in SIDES if side.startswith(options.only)]
        for side in sides:
            command = [options.torch_env / "bin/python", "-m", f"tests.recorders.{side}", folder]
            if subprocess.run(command, check=False).returncode:
                problems.append(f"{side}: the recorder failed")
        dumps, recordings = (sorted(pathlib.Path(folder).glob(pattern)) for pattern in ("*.npz", "replay-*"))
        if options.mistakes:
            problems += score.problems_of(pathlib.Path(folder))
        else:
            problems += [problem for path in dumps for problem in problems_of(path)]
            problems += replay.problems_of(pathlib.Path(folder))
    print("\n".join([*problems, f"{len(dumps)} dumps, {len(recordings)} recordings, {len(problems)} problems"]))
    return 1 if problems or not dumps + recordings else 0


if __name__ == "__main__":
    sys.exit(main())
