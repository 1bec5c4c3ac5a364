"""Metrics of divergence, clipping and mismatch.

Means travel as `WeightedSum`: sums of micro-batches, devices and processes are added, and divided once. Nothing here
carries a gradient. The mean of an array that is there already, such as `TokenStats.entropy` or the weights of a
correction, is `mean_metric(values, mask)`; over the tokens that a mask keeps, `mean_metric(values, kept)`. `Extremes`
merge in the same way. Statistics of a whole batch (`effective_sample_size`, `explained_variance`,
`probability_correlation`, `ratio_quantiles`) are taken before it is split. Arrays are `[..., T]`.
"""

from kljax.diagnostics.batch_statistics import effective_sample_size, explained_variance, probability_correlation
from kljax.diagnostics.clipping import (
    clip_fraction,
    clipped_tokens,
    dual_clip_fraction,
    ratio_fraction,
    value_clip_fraction,
)
from kljax.diagnostics.divergence import (
    chi_squared,
    kl_by_position,
    log_prob_abs_diff,
    log_prob_squared_diff,
    ppo_kl,
    reference_kl,
    rollout_kl,
)
from kljax.diagnostics.order_statistics import Extremes, log_prob_diff_extremes, ratio_quantiles
from kljax.diagnostics.perplexity import log_perplexity, log_perplexity_diff, perplexity, perplexity_ratio
from kljax.diagnostics.probabilities import probability_diff
from kljax.diagnostics.token_means import masked_fraction, mean_by_position, mean_metric
from kljax.diagnostics.top_k import top_k_overlap

__all__ = [
    "Extremes",
    "chi_squared",
    "clip_fraction",
    "clipped_tokens",
    "dual_clip_fraction",
    "effective_sample_size",
    "explained_variance",
    "kl_by_position",
    "log_perplexity",
    "log_perplexity_diff",
    "log_prob_abs_diff",
    "log_prob_diff_extremes",
    "log_prob_squared_diff",
    "masked_fraction",
    "mean_by_position",
    "mean_metric",
    "perplexity",
    "perplexity_ratio",
    "ppo_kl",
    "probability_correlation",
    "probability_diff",
    "ratio_fraction",
    "ratio_quantiles",
    "reference_kl",
    "rollout_kl",
    "top_k_overlap",
    "value_clip_fraction",
]
