"""From hidden states and the LM head to what a loss needs: log-probs and entropies of the sampled tokens."""

from kljax.log_probs._api import IMPLEMENTATIONS, TokenStats, log_probs_from_hidden

__all__ = ["IMPLEMENTATIONS", "TokenStats", "log_probs_from_hidden"]
