"""The batch of the preset recordings: four prompts of three completions, drawn once; the shape of their model."""

import dataclasses
import pathlib

import numpy as np

DIRECTORY = pathlib.Path(__file__).resolve().parent
MODEL = DIRECTORY / "model"
PROMPTS, SAMPLES = 4, 3
ROWS = PROMPTS * SAMPLES
PROMPT_LENGTH, COMPLETION_LENGTH = 5, 7
VOCABULARY, PAD, EOS = 32, 0, 1
TEMPERATURE = 0.8
EMPTY_ROW = 4
"""The row without a trained token: a completion that was cut off, which every system masks. Its reward is a penalty."""
PROMPT_LENGTHS = (5, 2, 4, 3)
COMPLETION_LENGTHS = (7, 2, 4, 3, 7, 1, 5, 6, 2, 4, 7, 3)
REWARDS = (1.0, 0.0, 0.5, 0.25, -1.25, 1.0, 0.75, 0.0, 1.0, 0.0, 0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The inputs of every recording. Prompts are padded on the left, completions on the right.

    Attributes:
      prompts: [B, P] int64.
      prompt_mask: [B, P] bool.
      completions: [B, T] int64; all rows but the empty one end in EOS.
      mask: [B, T] bool, the trained tokens.
      rewards: [B].
      groups: [B], number of the prompt.
      old_log_probs, ref_log_probs, rollout_log_probs: [B, T]; 0 under the mask.
      old_values: [B, T], of the state before each token; 0 under the mask.
    """

    prompts: np.ndarray
    prompt_mask: np.ndarray
    completions: np.ndarray
    mask: np.ndarray
    rewards: np.ndarray
    groups: np.ndarray
    old_log_probs: np.ndarray
    ref_log_probs: np.ndarray
    rollout_log_probs: np.ndarray
    old_values: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """Prompts and completions, [B, P + T]."""
        return np.concatenate([self.prompts, self.completions], axis=1)

    @property
    def token_mask(self) -> np.ndarray:
        """The attended tokens, [B, P + T]: the completion of the empty row is not attended."""
        return np.concatenate([self.prompt_mask, self.mask], axis=1)

    @property
    def token_rewards(self) -> np.ndarray:
        """The reward of each row at its last trained token, [B, T]; that of the empty row at its first."""
        last = (self.mask.sum(1) - 1).clip(min=0)
        return np.where(np.arange(self.mask.shape[1]) == last[:, None], self.rewards[:, None], 0.0)


def draw_tokens() -> dict[str, np.ndarray]:
    """Draws prompts and completions, and their masks."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, VOCABULARY, (PROMPTS, PROMPT_LENGTH)).repeat(SAMPLES, axis=0)
    lengths = np.array(PROMPT_LENGTHS).repeat(SAMPLES)[:, None]
    prompt_mask = np.arange(PROMPT_LENGTH) >= PROMPT_LENGTH - lengths
    completions = rng.integers(2, VOCABULARY, (ROWS, COMPLETION_LENGTH))
    column, ends = np.arange(COMPLETION_LENGTH), np.array(COMPLETION_LENGTHS)[:, None]
    real = column < ends
    trained = real & (np.arange(ROWS) != EMPTY_ROW)[:, None]
    completions = np.where((column == ends - 1) & trained, EOS, np.where(real, completions, PAD))
    return {
        "prompts": np.where(prompt_mask, prompts, PAD),
        "prompt_mask": prompt_mask,
        "completions": completions,
        "mask": trained,
        "rewards": np.array(REWARDS),
        "groups": np.arange(PROMPTS).repeat(SAMPLES),
    }


def draw_log_probs(log_probs: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Draws the log-probs of the other policies around those of the model, far enough that clips are active."""
    rng = np.random.default_rng(1)
    old = log_probs + 0.25 * rng.normal(size=mask.shape)
    drawn = {
        "old_log_probs": old,
        "ref_log_probs": log_probs + 0.4 * rng.normal(size=mask.shape),
        "rollout_log_probs": old + 0.15 * rng.normal(size=mask.shape),
        "old_values": 0.3 * rng.normal(size=mask.shape),
    }
    return {name: np.where(mask, array, 0.0) for name, array in drawn.items()}


def load() -> Recorded:
    """Loads the recorded batch."""
    return Recorded(**np.load(DIRECTORY / "batch.npz"))
