"""Runs of TRL, recorded as docs/replay.md says: `python -m tests.recorders.trl_replay FOLDER`.

Needs torch, transformers and trl; tests/recorders/__main__.py runs it in their environment.
"""

import contextlib
import json
import pathlib
import sys
from typing import Any

import transformers

from tests.goldens.parity.page import REPLAY, blocks
from tests.recorders.trl_side import make_trainer, unrecorded_afterwards

STEPS = 3
# Two updates a step: in the second the ratios differ from 1, and clips are active.
COMMON = {"beta": 0.04, "num_iterations": 2, "max_steps": 2 * STEPS, "learning_rate": 1e-3, "bf16": False}
# TRL's default precision, and an optimizer whose updates are proportional to the gradient.
BF16, SGD = {"bf16": True}, {"optim": "sgd", "learning_rate": 0.02}
# The presets, each with a variant behind a dash, and what TRL sets for each.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "grpo-sgd": {"loss_type": "grpo", **SGD},
    "grpo-bf16": {"loss_type": "grpo", **BF16},
    "grpo-bf16-sgd": {"loss_type": "grpo", **BF16, **SGD},
}


class WeightSaver(transformers.TrainerCallback):
    """Saves the weights after each optimizer step."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        model.save_pretrained(self.folder / f"update-{state.global_step}")


def record(folder: pathlib.Path, options: dict[str, Any]) -> None:
    """Writes `model/`, `recording.jsonl`, `update-N/` and `log.json`, the losses and KLs of each update."""
    folder.mkdir()
    logged = {"lr_scheduler_type": "constant", "logging_steps": 1}
    with contextlib.chdir(folder), unrecorded_afterwards():
        exec(blocks(REPLAY)["TRL"], {})
        trainer = make_trainer(folder, **{**COMMON, **logged, **options})
        trainer.model.save_pretrained(folder / "model")
        trainer.processing_class.save_pretrained(folder / "model")
        trainer.add_callback(WeightSaver(folder))
        trainer.train()
    (folder / "log.json").write_text(json.dumps([log for log in trainer.state.log_history if "loss" in log]))


def main() -> None:
    """Records a run of each preset in a folder `replay-trl-PRESET`."""
    for name, options in PRESETS.items():
        record(pathlib.Path(sys.argv[1]) / f"replay-trl-{name}", options)


if __name__ == "__main__":
    main()
