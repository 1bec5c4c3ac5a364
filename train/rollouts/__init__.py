"""Rollouts: the protocol `Source`, its implementations, and the batch made from their completions."""
