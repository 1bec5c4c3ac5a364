"""The exports of a run of configs/real.yaml, as PEFT and transformers read them.

    python -m tests.real.exports runs/real --torch-env ENV      # ENV has torch, transformers and peft

The adapter on its base and the merged weights score replies to held-out problems, and continue the prompts greedily.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from tests.real.compare import TOLERANCE
from tests.real.replies import draw_replies, score
from train.process.console import run_command
from train.run.saved_run import SavedRun
from train.run.setup import make_context
from train.sequences.batch import move_columns

PROMPTS = 8
FORMS: Mapping[str, tuple[str, ...]] = {"adapter": (), "merged": ("--merge", "--dtype", "float32")}
SIDE = Path(__file__).parent / "exports_side.py"


@dataclasses.dataclass(frozen=True)
class ExportedScores:
    """How far an export is from the run.

    Attributes:
      difference: largest difference of a log-prob of a reply, as a share of the largest logit.
      same: greedy continuations that are the same.
      prompts: all continuations.
    """

    difference: float
    same: int
    prompts: int


def reply_arrays(run: Path) -> dict[str, np.ndarray]:
    """Replies greedily to held-out problems with the last step of a run, and scores the replies at temperature 1."""
    saved = SavedRun.at(run, ["temperature=1.0"])
    context = make_context(saved.config)
    with jax.set_mesh(context.mesh):
        policy = saved.policy(context.model, context.mesh, saved.step(None))
        replies = draw_replies(context, policy, PROMPTS, greedy=True)
        scored = score(context.model, policy, replies)
    arrays = {"tokens": replies.tokens, "token_mask": replies.token_mask, "replies": replies.completion_mask}
    prompts = np.asarray(replies.token_mask & ~replies.completion_mask).sum(1)
    # transformers completes prompts that are padded on the left.
    by = prompts - prompts.max()
    width = int(prompts.max()) + saved.config.data.completion_length()
    return {name: move_columns(np.asarray(value), by, width) for name, value in {**arrays, "log_probs": scored}.items()}


def compare(run: Path, torch_env: Path, directory: Path) -> dict[str, ExportedScores]:
    """Exports the last step of a run in both forms, and lets PEFT and transformers read the folders."""
    arrays = reply_arrays(run)
    np.savez(directory / "replies.npz", **arrays)
    compared = {}
    for name, options in FORMS.items():
        target = directory / name
        subprocess.run([sys.executable, "-m", "train.export", run, "--to", target, *options], check=True)
        subprocess.run([torch_env / "bin" / "python", SIDE, name, directory], check=True)
        with np.load(directory / f"{name}.npz") as other:
            far = np.abs(other["log_probs"] - arrays["log_probs"])[arrays["replies"]].max() / other["scale"]
            width = other["tokens"].shape[1]
            # Positions after the end of a reply hold what each side pads with.
            differs = (other["tokens"] != arrays["tokens"][:, :width]) & arrays["replies"][:, :width]
            compared[name] = ExportedScores(float(far), int((~differs.any(1)).sum()), len(differs))
    return compared


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each form; the exit code is 1 if one is too far from the run, 2 for a user's error."""
    command = argparse.ArgumentParser(prog="python -m tests.real.exports", description=str(__doc__).partition("\n")[0])
    command.add_argument("run", metavar="RUN", type=Path, help="directory of a run of configs/real.yaml")
    command.add_argument("--torch-env", type=Path, required=True, help="with torch, transformers and peft")
    options = command.parse_args(arguments)

    def run() -> int:
        with tempfile.TemporaryDirectory() as scratch:
            compared = compare(options.run, options.torch_env, Path(scratch))
        for name, far in compared.items():
            print(f"{name}: log-probs {far.difference:.1e} of the largest logit, {far.same} of {far.prompts} equal")
        return int(any(far.difference > TOLERANCE or far.same < far.prompts for far in compared.values()))

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
