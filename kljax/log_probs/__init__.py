"""From hidden states and the LM head to what a loss needs, without ever holding the logits of all positions."""

from kljax.log_probs._api import TokenStats, jsd_from_hidden, kl_from_hidden, log_probs_from_hidden
from kljax.log_probs._options import HeadSharding, Tile
from kljax.log_probs._prepare import IMPLEMENTATIONS

__all__ = [
    "IMPLEMENTATIONS",
    "HeadSharding",
    "Tile",
    "TokenStats",
    "jsd_from_hidden",
    "kl_from_hidden",
    "log_probs_from_hidden",
]
