"""The batch of the parity dumps: a tiny LM head under four policies, prompts of several lengths, padding."""

from typing import Any

import numpy as np

ROWS, LENGTH, WIDTH, VOCABULARY, PADDED = 8, 16, 6, 20, 24
GROUPS = 2
# Rows whose hidden states are recorded.
SCORED = (0, 3, 5)


def draw(seed: int = 5) -> dict[str, np.ndarray]:
    """Draws float32 hidden states of four policies, a head, tokens, lengths and rewards."""
    rng = np.random.default_rng(seed)
    prompts = np.array([2, 3, 4, 3, 2, 5, 3, 4])
    lengths = np.array([16, 12, 16, 14, 7, 15, 11, 16])
    hidden = rng.normal(size=(ROWS, LENGTH, WIDTH))
    arrays: dict[str, Any] = {"hidden": hidden}
    for name, distance in (("old_hidden", 0.25), ("rollout_hidden", 0.3), ("ref_hidden", 0.35)):
        arrays[name] = hidden + distance * rng.normal(size=hidden.shape)
    arrays["head"] = 1.5 * rng.normal(size=(WIDTH, PADDED))
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    arrays["tokens"] = rng.integers(0, VOCABULARY, size=(ROWS, LENGTH))
    arrays["prompt_lengths"], arrays["lengths"] = prompts, lengths
    arrays["group_ids"] = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    arrays["rewards"] = (np.round(rng.normal(size=ROWS) * 16) / 16).astype(np.float32)
    arrays["rewards"][0], arrays["rewards"][4] = -1.5, -1.25
    return arrays


def completion_mask(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the mask of the completions."""
    position = np.arange(LENGTH)
    return (position >= arrays["prompt_lengths"][:, None]) & (position < arrays["lengths"][:, None])
