"""What to log about divergence, clipping and mismatch.

Means travel as `WeightedSum`: those of micro-batches, devices and processes are added, and divided once. Nothing here
carries a gradient. The mean of an array that is there already, such as `TokenStats.entropy`, is
`WeightedSum.of(values, mask)`. Statistics that are no means (`effective_sample_size`, `explained_variance`) are taken
of a whole batch, before it is split. Arrays are `[..., T]`.
"""

from kljax.diagnostics.clipping import clip_fraction, dual_clip_fraction
from kljax.diagnostics.divergence import log_prob_abs_diff, ppo_kl, reference_kl, rollout_kl
from kljax.diagnostics.whole import effective_sample_size, explained_variance

__all__ = [
    "clip_fraction",
    "dual_clip_fraction",
    "effective_sample_size",
    "explained_variance",
    "log_prob_abs_diff",
    "ppo_kl",
    "reference_kl",
    "rollout_kl",
]
