"""Runs of the round trip: a folder in, some steps with a KL to a reference, and the log-probs of its policy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from train.config.load import load
from train.data.tokenizers import load_tokenizer
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.run.run import run
from train.run.saved_run import SavedRun
from train.weights.model import make_model

STEPS = 3
# Log-probs in float32, on both sides.
TOLERANCE = 5e-6
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


def train(folder: Path, directory: Path, *overrides: str) -> SavedRun:
    """Trains a folder, with the run in `directory`."""
    config = directory / "config.yaml"
    config.write_text(CONFIG.format(steps=STEPS, output=directory, folder=folder))
    code = run(load(config, list(overrides)))
    if code:
        raise SystemExit(f"{directory.name}: the run ended with {code}")
    return SavedRun.at(directory / "run")


def score_step(saved: SavedRun, step: int = STEPS) -> np.ndarray:
    """The log-probs that kljax gives the tokens with the policy of a step."""
    model = make_model(saved.config, load_tokenizer(saved.config))
    return score(model, saved.policy(model, make_mesh(), step))


def score(model: Any, policy: Any) -> np.ndarray:
    """The log-probs that kljax gives the tokens with a policy."""
    tokens = tokens_to_score()

    @jax.jit
    def log_probs(policy: Any) -> jax.Array:
        return token_stats(ScoredPolicy(model, policy), Sequences.rows(tokens, tokens >= 0), temperature=1.0)[
            0
        ].log_prob

    return np.asarray(log_probs(policy))


class Compared(NamedTuple):
    """Log-probs of kljax beside those of transformers.

    Attributes:
      name: of the run.
      line: what is printed of the differences.
      difference: the largest, nats.
      moved: how far training moved a log-prob, nats.
    """

    name: str
    line: str
    difference: float
    moved: float


def judge(compared: Sequence[Compared]) -> int:
    """Prints each comparison, and the largest difference; returns the exit code."""
    for name, line, _, moved in compared:
        print(f"{line}; training moved it by {moved:.2f}")
        if moved < 100 * TOLERANCE:
            print(f"{name}: training moved nothing, which proves nothing")
            return 1
    worst = max(difference for _, _, difference, _ in compared)
    print(f"{len(compared)} comparisons, largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)
