"""Three steps of TRL on SmolLM2-135M-Instruct, done again by kljax from the same weights on the same rows.

    python -m tests.real.trl_update --torch-env ENV      # ENV has torch, transformers, peft and trl

TRL trains an adapter by the recipe of configs/real.yaml, with two updates a step: in the second the ratios differ from
1. What it sampled is recorded as docs/replay.md says, and replayed. Losses, KLs and each matrix of the adapter are
compared after every step.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from tests.recorders.replay import CONFIG as REPLAY_CONFIG
from tests.recorders.replay import MEASURED
from train import real
from train.config.load import load
from train.config.schema import Config
from train.data.tasks import load_task
from train.data.tokenizers import load_tokenizer
from train.models.sharding import make_mesh
from train.process.console import run_command
from train.run.metrics import read_metrics
from train.run.run import run
from train.run.saved_run import SavedRun
from train.weights.model import make_model
from train.weights.peft import save_adapter

STEPS, UPDATES, PROMPTS, SAMPLES, NEW_TOKENS = 3, 2, 2, 4, 24
WEIGHTS = "adapter_model.safetensors"
# Relative differences in float32: of a loss or KL, of the adapter over its way, and of any matrix over its own way.
LOSS, ADAPTER, MATRIX = 1e-3, 1e-3, 1e-2


class StepDifference(NamedTuple):
    """How far kljax is from TRL after a step.

    Attributes:
      loss, kl: relative, of the means over the updates of the step.
      adapter: norm of the difference of all matrices, over that of their way since the start.
      median, largest: the same of each matrix.
      name: of the matrix with the largest.
    """

    loss: float
    kl: float
    adapter: float
    median: float
    largest: float
    name: str

    @property
    def exact(self) -> bool:
        """Whether all differences are within the bounds."""
        return max(self.loss, self.kl) < LOSS and self.adapter < ADAPTER and self.largest < MATRIX


def recipe(folder: Path) -> Config:
    """Loads the recipe of `make real`."""
    return load(real.ROOT / real.CONFIG, [f"model.path={folder}"]).config


def trl_options(config: Config, prompts: int = STEPS * PROMPTS) -> dict[str, Any]:
    """Returns the recipe in the words of TRL, with the first problems, which it takes in this order."""
    assert config.lora is not None
    lora = {"r": config.lora.rank, "lora_alpha": config.lora.alpha, "target_modules": list(config.lora.targets)}
    return {
        "problems": [example.prompt for example in load_task(config).train[:prompts]],
        "lora": lora,
        **{"per_device_train_batch_size": PROMPTS * SAMPLES, "num_generations": SAMPLES, "num_iterations": UPDATES},
        **{"max_steps": STEPS * UPDATES, "max_completion_length": NEW_TOKENS, "temperature": config.temperature},
        **{"loss_type": "dapo", "epsilon": config.loss.clip_low, "epsilon_high": config.loss.clip_high},
        **{"scale_rewards": "none", "beta": 0.04, "learning_rate": config.optim.learning_rate},
    }


def replay(folder: Path, config: Config, recorded: Path) -> SavedRun:
    """Trains on the recording from TRL's first adapter."""
    loaded = load(
        REPLAY_CONFIG,
        [
            *(f"model.path={folder}", f"lora.path={recorded / 'update-0'}", f"output={recorded / 'runs'}"),
            *(f"rollout.source.path={recorded / 'recording.jsonl'}", "preset=trl/dapo", *MEASURED),
            *(f"steps={STEPS}", f"optim.epochs={UPDATES}", f"optim.learning_rate={config.optim.learning_rate}"),
            *(f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}"),
            *("data.max_prompt_length=80", f"data.max_completion_length={NEW_TOKENS}", "advantage.scale=none"),
            *(f"temperature={config.temperature}", "checkpoint={every: 1, keep: 9}", "report.rollouts=0"),
        ],
    )
    assert run(loaded) == 0
    return SavedRun.at(recorded / "runs/replay")


def matrices(saved: SavedRun, step: int, folder: Path) -> Mapping[str, np.ndarray]:
    """Returns the adapter of a step under the names of PEFT."""
    model = make_model(saved.config, load_tokenizer(saved.config))
    save_adapter(folder, model, saved.policy(model, make_mesh(), step).adapter, base_name=None)
    return load_file(folder / WEIGHTS)


def compare(folder: Path, torch_env: Path, recorded: Path) -> list[StepDifference]:
    """Lets TRL train in a folder, replays its run, and compares them step by step."""
    config = recipe(folder)
    (recorded / "options.json").write_text(json.dumps(trl_options(config)))
    side = [torch_env / "bin/python", "-m", "tests.real.trl_update_side", recorded, folder]
    subprocess.run(side, cwd=real.ROOT, check=True)
    saved = replay(folder, config, recorded)
    logs = json.loads((recorded / "log.json").read_text())
    steps = [record for record in read_metrics(saved.directory.metrics) if record["phase"] == "train"]
    start, compared = load_file(recorded / "update-0" / WEIGHTS), []
    for step in range(1, STEPS + 1):
        # TRL logs every update, kljax the mean of a step.
        updates, record = logs[(step - 1) * UPDATES : step * UPDATES], steps[step - 1]
        pairs = [
            (record[metric], np.mean([update[logged] for update in updates]))
            for logged, metric in (("loss", "loss"), ("kl", "kl_loss_per_token"))
        ]
        loss, kl = (float(abs(kljax / trl - 1)) for kljax, trl in pairs)
        expected = load_file(recorded / f"update-{step * UPDATES}" / WEIGHTS)
        actual = matrices(saved, step, recorded / f"kljax-{step}")
        if actual.keys() != expected.keys():
            raise RuntimeError(f"the adapters have other matrices: {sorted(actual.keys() ^ expected.keys())[:4]}")
        norms = {
            name: (np.linalg.norm(actual[name] - value), np.linalg.norm(value - start[name]))
            for name, value in expected.items()
        }
        shares = {name: float(off / way) for name, (off, way) in norms.items()}
        off, way = (float(np.linalg.norm(column)) for column in zip(*norms.values(), strict=True))
        name = max(shares, key=lambda key: shares[key])
        compared.append(
            StepDifference(loss, kl, off / way, float(np.median(list(shares.values()))), shares[name], name)
        )
    return compared


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each step; the exit code is 1 if one is beyond the bounds, 2 for a user's error."""
    command = argparse.ArgumentParser(prog="python -m tests.real.trl_update", description=str(__doc__).split("\n")[0])
    command.add_argument("--torch-env", type=Path, required=True, help="with torch, transformers, peft and trl")
    options = command.parse_args(arguments)

    def compare_steps() -> int:
        with tempfile.TemporaryDirectory() as scratch:
            compared = compare(real.fetch(), options.torch_env, Path(scratch))
        print("| step | loss | KL | adapter | matrix, median | largest | of |\n|--:|--:|--:|--:|--:|--:|---|")
        for step, far in enumerate(compared, 1):
            numbers = " | ".join(f"{value:.1e}" for value in far[:-1])
            print(f"| {step} | {numbers} | `{far.name.removeprefix('base_model.model.model.')}` |")
        return int(not all(far.exact for far in compared))

    return run_command(compare_steps)


if __name__ == "__main__":
    raise SystemExit(main())
