"""A folder made by transformers, trained with each reference source, exported, and scored by transformers again.

    python -m tests.round_trip --torch-env ENV [--output DIR]

ENV is an environment with torch, transformers and peft, as `tests/goldens/models/generate.py` describes it. Every run
starts from the Qwen 3 folder that transformers wrote, takes three steps with a KL to its reference, and is exported
merged and, where it has an adapter, as an adapter of PEFT. The log-probs that transformers computes from both are
compared with the ones of kljax. Exit code 1 if one differs by more than the tolerance.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from train.command import quiet_orbax
from train.config import load
from train.export import export
from train.policy import token_stats
from train.run import run
from train.saved import SavedRun
from train.setup import make_model
from train.sharding import make_mesh
from train.tokenizer import load_tokenizer

FOLDER = Path(__file__).parents[1] / "goldens" / "models" / "qwen3"
SCORER = Path(__file__).with_name("score.py")
# Log-probs in float32, on both sides.
TOLERANCE = 5e-6
STEPS = 3
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
CONFIG = """
steps: {steps}
output: {output}
model: {{path: {folder}}}
data: {{max_operand: 9, max_prompt_length: 64, max_completion_length: 6}}
rollout: {{prompts_per_step: 2, samples_per_prompt: 4}}
loss: {{entropy_coef: 0.1}}
kl: {{loss: {{coef: 0.1}}}}
optim: {{learning_rate: 1e-2}}
eval: {{every: {steps}, prompts: 2, batch_size: 2}}
checkpoint: {{every: {steps}}}
"""


def tokens_to_score() -> np.ndarray:
    """`[4, 24]` int32, of the vocabulary that the folder's tokenizer uses."""
    return np.random.default_rng(0).integers(0, 300, (4, 24)).astype(np.int32)


@quiet_orbax()
def train_and_export(name: str, directory: Path) -> np.ndarray:
    """Trains against one reference and exports; returns the log-probs that kljax gives the trained policy."""
    config, root = directory / "config.yaml", directory / "run"
    lora = "null" if name.endswith("all weights") else LORA
    config.write_text(CONFIG.format(steps=STEPS, output=directory, folder=FOLDER))
    code = run(load(config, [f"lora={lora}", f"reference={REFERENCES[name]}"]))
    if code:
        raise SystemExit(f"{name}: the run ended with {code}")
    export(root, directory / "hf", step=None, form="hf", merge=lora != "null")
    if lora != "null":
        export(root, directory / "peft", step=None, form="peft", merge=False, base_name=str(FOLDER))
    saved = SavedRun.at(root)
    model, mesh, tokens = make_model(saved.config, load_tokenizer(saved.config)), make_mesh(), tokens_to_score()
    policy = saved.policy(model, mesh, STEPS)
    stats, _ = jax.jit(lambda p: token_stats(model, p, tokens, tokens >= 0, temperature=1.0))(policy)
    return np.asarray(stats.log_prob)


def main() -> int:
    """Prints a line for each export; returns the exit code."""
    command = argparse.ArgumentParser(prog="python -m tests.round_trip", description=str(__doc__).partition("\n")[0])
    command.add_argument("--torch-env", type=Path, required=True, help="an environment with torch, transformers, peft")
    command.add_argument("--output", type=Path, help="where runs and exports are kept; else they are removed")
    options = command.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        output = options.output or Path(temporary)
        output.mkdir(parents=True, exist_ok=True)
        np.save(output / "tokens.npy", tokens_to_score())
        ours = {}
        for name in REFERENCES:
            directory = output / name.replace(", ", "-").replace(" ", "-")
            directory.mkdir()
            ours[directory.name] = train_and_export(name, directory)
        subprocess.run([options.torch_env / "bin" / "python", SCORER, output, FOLDER], check=True)
        return compare(output, ours)


def compare(output: Path, ours: dict[str, np.ndarray]) -> int:
    """Compares what the scorer left with the log-probs of kljax."""
    worst = 0.0
    before = np.load(output / "before.npy")
    for name, expected in ours.items():
        moved = np.abs(expected - before).max()
        for form in ("hf", "peft"):
            scored = output / name / f"{form}.npy"
            if scored.exists():
                difference = float(np.abs(np.load(scored) - expected).max())
                worst = max(worst, difference)
                print(f"{name:>18} {form:>5}: differs by {difference:.1e} nats; training moved it by {moved:.2f}")
        if moved < 100 * TOLERANCE:
            print(f"{name}: training moved nothing, which proves nothing")
            return 1
    print(f"largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
