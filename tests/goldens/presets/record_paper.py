"""Papers: whole steps of TRL's `GRPOTrainer` with the settings of the papers. Needs what record_trl.py needs."""

import functools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from tests.goldens.presets import model, record, record_trl

ABOUT = {"version": "papers, by trl 1.16.0", "dtype": "float64"}
GRPO: dict[str, Any] = {"epsilon": 0.2, "beta": 0.0, "scale_rewards": "group"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {**GRPO, "loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    "dapo": {**GRPO, "loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {**GRPO, "loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {
        **GRPO,
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {**GRPO, "loss_type": "cispo", "epsilon_high": 5.0},
}


def steps(root: pathlib.Path) -> Iterator[record.Step]:
    """Every algorithm with one and with two micro-batches."""
    sys.path.insert(0, str(root))
    yield from model.float64_steps(functools.partial(record_trl.run, algorithms=ALGORITHMS), ALGORITHMS)
