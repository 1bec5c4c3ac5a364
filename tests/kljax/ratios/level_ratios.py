"""Log-probs of two policies, and their importance ratios at every level in NumPy."""

import numpy as np

from tests.masks import MASK, draw

LP, OLD = draw(0.7, 0.7)
D = np.where(MASK, LP - OLD, 0)


def level_ratio(level: str) -> np.ndarray:
    """Returns the ratios of a level as `[B, T]`, unmasked."""
    if level == "token":
        return np.exp(LP - OLD)
    total = D.sum(-1) if level == "sequence" else D.sum(-1) / np.maximum(MASK.sum(-1), 1)
    return np.broadcast_to(np.exp(total)[:, None], MASK.shape)
