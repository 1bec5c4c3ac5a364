"""Log-probs, entropies and divergences from hidden states and the LM head, with one tile of logits at a time."""

from kljax.log_probs._api import (
    TokenStats,
    jsd_from_hidden,
    kl_from_hidden,
    log_probs_from_hidden,
    renormalized_log_probs,
    token_jsd,
    token_kl,
    token_log_probs,
)
from kljax.log_probs._head import Head, HeadSharding, Tile
from kljax.log_probs._inputs import ReferenceStates
from kljax.log_probs._token_loss import token_loss_from_hidden

__all__ = [
    "Head",
    "HeadSharding",
    "ReferenceStates",
    "Tile",
    "TokenStats",
    "jsd_from_hidden",
    "kl_from_hidden",
    "log_probs_from_hidden",
    "renormalized_log_probs",
    "token_jsd",
    "token_kl",
    "token_log_probs",
    "token_loss_from_hidden",
]
