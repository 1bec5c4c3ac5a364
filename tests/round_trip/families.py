"""A tiny model of every family, read, trained, exported and read again, with transformers at both ends.

    python -m tests.round_trip.families --torch-env ENV          # `make test-transformers` runs this
    python -m tests.round_trip.families --torch-env ENV --only gpt_oss mixtral

ENV is the environment of `tests.round_trip`. All weights are trained. The log-probs of the folder that transformers
wrote, and of the exported one, are compared with those of transformers; the exported one gives the policy of the run.
The same holds for the adapter that PEFT wrote for a mixture of experts: on attention, router and experts, with one A
for gates and ups, which have their own after training. Exit code 1 if one differs.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import kljax
from tests.round_trip.runs import Compared, judge, score, score_step, tokens_to_score, train
from train.export import export
from train.models import Decoder
from train.models.sharding import make_mesh
from train.process.console import quiet_orbax
from train.weights.huggingface import load_params
from train.weights.huggingface.config import decoder_config
from train.weights.huggingface.mxfp4 import dequantise_mxfp4
from train.weights.peft import load_adapter, read_peft_config

MAKE, SCORER = (Path(__file__).with_name(name) for name in ("make_families.py", "score.py"))


@quiet_orbax()
def train_and_reload(directory: Path) -> dict[str, np.ndarray]:
    """Trains `directory/model` and exports it as `directory/hf`; returns the log-probs of kljax for both folders."""
    saved = train(directory / "model", directory, "lora=null", "reference={source: base}")
    export(directory / "run", directory / "hf", step=None, form="hf", merge=False)
    scores = {}
    for name in ("model", "hf"):
        model = Decoder(decoder_config(directory / name))
        scores[name] = score(model, kljax.Policy(load_params(directory / name, model, make_mesh())))
    if not np.array_equal(scores["hf"], score_step(saved)):
        raise SystemExit(f"{directory.name}: the exported folder is another policy than that of the run")
    return scores


@quiet_orbax()
def train_adapter(directory: Path) -> dict[str, np.ndarray]:
    """Trains `directory/adapter` and exports it as `directory/peft`; returns the log-probs of kljax for both."""
    run = directory / "adapted"
    run.mkdir()
    saved = train(directory / "model", run, f"lora={{path: {directory / 'adapter'}}}", "reference={source: base}")
    export(run / "run", directory / "peft", step=None, form="peft", merge=False)
    scores, base = {}, None
    for name in ("adapter", "peft"):
        lora = read_peft_config(directory / name)
        model = Decoder(decoder_config(directory / "model", lora=lora))
        base = load_params(directory / "model", model, make_mesh()) if base is None else base
        scores[name] = score(model, kljax.Policy(base, load_adapter(directory / name, model, make_mesh())))
    if not np.array_equal(scores["peft"], score_step(saved)):
        raise SystemExit(f"{directory.name}: the exported adapter is another policy than that of the run")
    return scores


def check_mxfp4(path: Path) -> None:
    """Compares the values of every byte with every scale."""
    with np.load(path) as file:
        got, expected = dequantise_mxfp4(file["blocks"], file["scales"]), file["values"]
    different = ~((got.astype(np.float32) == expected) | (np.isnan(expected) & np.isnan(got.astype(np.float32))))
    if different.any():
        raise SystemExit(f"mxfp4: {different.sum()} of {different.size} values differ from those of transformers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each family; returns the exit code."""
    command = argparse.ArgumentParser(
        prog="python -m tests.round_trip.families", description=str(__doc__).partition("\n")[0]
    )
    command.add_argument("--torch-env", type=Path, required=True, help="an environment with torch and transformers")
    command.add_argument("--only", nargs="+", help="names of some of the families")
    options = command.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        root, python = Path(temporary), options.torch_env / "bin" / "python"
        subprocess.run([python, MAKE, root, *(options.only or [])], check=True)
        check_mxfp4(root / "mxfp4.npz")
        np.save(root / "tokens.npy", tokens_to_score())
        folders = [path for path in sorted(root.iterdir()) if path.is_dir()]
        actual = [(path, train_and_reload(path)) for path in folders]
        actual += [(path, train_adapter(path)) for path in folders if (path / "adapter").is_dir()]
        subprocess.run([python, SCORER, root], check=True)
        return judge([compare(path, scores) for path, scores in actual])


def compare(path: Path, scores: dict[str, np.ndarray]) -> Compared:
    """Compares the log-probs of a folder, and of its export, with those that transformers left beside them."""
    far = [float(np.abs(np.load(path / f"{name}.npy") - got).max()) for name, got in scores.items()]
    source, exported = scores
    line = f"{path.name:>13} {source:>7}: differs by {far[0]:.1e} nats as read, {far[1]:.1e} as exported"
    return Compared(path.name, line, max(far), float(np.abs(scores[exported] - scores[source]).max()))


if __name__ == "__main__":
    sys.exit(main())
