"""A folder made by transformers, trained with each reference source, exported, and scored by transformers again.

    python -m tests.round_trip --torch-env ENV [--output DIR]   # `make test-transformers` runs this
    python -m tests.round_trip --torch-env ENV --record         # writes tests/goldens/exports, and does nothing else

ENV is an environment with torch, transformers and peft, as `tests/goldens/models/generate.py` describes it. Every run
starts from the Qwen 3 folder that transformers wrote, takes three steps with a KL to its reference, and is exported
merged and, where it has an adapter, as an adapter of PEFT. The log-probs that transformers computes from both are
compared with the ones of kljax. Exit code 1 if one differs by more than the tolerance.

What `--record` leaves is what CI holds without torch, in `tests/train/models/folder/test_exported.py`: `merged/` and
`adapter/`, both exports of the run with the reference "base", and `expected.npz`, what transformers and PEFT compute of
them: `tokens` [B, T], and log-probs [B, T], 0 at the first token, of the folder that the run began with (`before`), of
`merged/` (`merged`), and of the folder it began with under `adapter/` (`adapter`). Without `--record` both are scored
again as well. Training gives other weights on another machine, so a second recording is another golden.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.round_trip.runs import Compared, judge, score_step, tokens_to_score, train
from train.export import export
from train.process.console import quiet_orbax

FOLDER = Path(__file__).parents[1] / "goldens" / "models" / "qwen3"
EXPORTS = Path(__file__).parents[1] / "goldens" / "exports"
# The folder and the name that score.py leaves its numbers under, and the folder they are recorded for.
FORMS = {"hf": "merged", "peft": "adapter"}
BASE_NAME = "tiny-random/qwen3"
SCORER = Path(__file__).with_name("score.py")
LORA = "{rank: 4, alpha: 8.0, targets: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}"
REFERENCES = {
    "base": "{source: base}",
    "step": "{source: step, step: 0}",
    "adapter": f"{{source: adapter, path: {FOLDER / 'adapter'}}}",
    "checkpoint": f"{{source: checkpoint, path: {FOLDER}}}",
    "ema": "{source: ema, decay: 0.9}",
    "refreshed": "{source: base, refresh_every: 2}",
    "base, all weights": "{source: base}",
}


@quiet_orbax()
def train_and_export(name: str, directory: Path) -> np.ndarray:
    """Trains against one reference and exports; returns the log-probs that kljax gives the trained policy."""
    lora = "null" if name.endswith("all weights") else LORA
    saved = train(FOLDER, directory, f"lora={lora}", f"reference={REFERENCES[name]}")
    root = directory / "run"
    export(root, directory / "hf", step=None, form="hf", merge=lora != "null")
    if lora != "null":
        export(root, directory / "peft", step=None, form="peft", merge=False, base_name=BASE_NAME)
    return score_step(saved)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each export; returns the exit code."""
    command = argparse.ArgumentParser(prog="python -m tests.round_trip", description=str(__doc__).partition("\n")[0])
    command.add_argument("--torch-env", type=Path, required=True, help="an environment with torch, transformers, peft")
    command.add_argument("--output", type=Path, help="where runs and exports are kept; else they are removed")
    command.add_argument("--record", action="store_true", help="write tests/goldens/exports from one of the runs")
    options = command.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        output = options.output or Path(temporary)
        output.mkdir(parents=True, exist_ok=True)
        np.save(output / "tokens.npy", tokens_to_score())
        actual = {} if options.record else place_recorded(output)
        for name in ["base"] if options.record else REFERENCES:
            directory = output / name.replace(", ", "-").replace(" ", "-")
            directory.mkdir()
            scored = train_and_export(name, directory)
            actual |= {directory / form: scored for form in FORMS if (directory / form).is_dir()}
        subprocess.run([options.torch_env / "bin" / "python", SCORER, output, FOLDER], check=True)
        code = compare(output, actual)
        if options.record and code == 0:
            record(output)
        return code


def place_recorded(output: Path) -> dict[Path, np.ndarray]:
    """The recorded exports among those to score, with what transformers computed of them."""
    with np.load(EXPORTS / "expected.npz") as expected:
        assert np.array_equal(expected["tokens"], tokens_to_score())
        actual = {output / "recorded" / form: expected[name] for form, name in FORMS.items()}
    for folder in actual:
        shutil.copytree(EXPORTS / FORMS[folder.name], folder)
    return actual


def record(output: Path) -> None:
    """Both exports of the run, and what transformers computed of them, in place of the recorded ones."""
    shutil.rmtree(EXPORTS, ignore_errors=True)
    numbers = {name: np.load(output / f"{name}.npy") for name in ("tokens", "before")}
    for form, name in FORMS.items():
        shutil.copytree(output / "base" / form, EXPORTS / name)
        numbers[name] = np.load(output / "base" / f"{form}.npy")
    np.savez_compressed(EXPORTS / "expected.npz", **numbers)
    print(f"{EXPORTS}: {sum(path.stat().st_size for path in EXPORTS.rglob('*') if path.is_file())} bytes")


def compare(output: Path, ours: dict[Path, np.ndarray]) -> int:
    """Compares what the scorer left with the log-probs of kljax, or with those recorded; returns the exit code."""
    before = np.load(output / "before.npy")

    def compared(folder: Path, expected: np.ndarray) -> Compared:
        name, form = folder.parts[-2:]
        difference = float(np.abs(np.load(folder.with_suffix(".npy")) - expected).max())
        line = f"{name:>18} {form:>5}: differs by {difference:.1e} nats"
        return Compared(name, line, difference, float(np.abs(expected - before).max()))

    return judge([compared(folder, expected) for folder, expected in ours.items()])


if __name__ == "__main__":
    sys.exit(main())
