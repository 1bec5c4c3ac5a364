"""The names of metrics that several modules read; no JAX, for reports and plots."""

KL_ESTIMATE = "kl_reference"
"""The mean of k3 over the sampled tokens. It jumps at a token whose probability under the policy is near 0."""
KL_EXACT = "kl_reference_exact"
"""The mean over the prefixes of the KL over the whole vocabulary."""
KL_METRICS = (KL_ESTIMATE, KL_EXACT)
"""The two measurements of KL(policy || reference)."""
ROLLOUT_KL_MAX = "rollout_kl_max"
"""The largest k3 of KL(sampler || policy) at one token, with `kl.rollout`."""
SAMPLING_BIAS = "sampling_bias"
"""The mean of log-prob + entropy of sampled tokens."""
SAMPLING_BIAS_Z = "sampling_bias_z"
"""The sum of log-prob + entropy of sampled tokens, in standard deviations."""
AGREEMENT = "routing_agreement"
"""How often the first router chooses the recorded experts of a token."""
COMPARED = "routing_compared"
"""The number of tokens that are compared with recorded experts."""
AGREEMENT_BEFORE = "routing_agreement_before"
"""How often the first router chooses the recorded experts of the token before."""
AGREEMENT_AFTER = "routing_agreement_after"
"""How often the first router chooses the recorded experts of the token after."""
FIRST_UPDATE_ALONE = (SAMPLING_BIAS, SAMPLING_BIAS_Z, AGREEMENT, AGREEMENT_BEFORE, AGREEMENT_AFTER, COMPARED)
"""Metrics of the first update on a batch: later ones have another policy than the one that sampled."""


def largest_of(name: str) -> str:
    """Returns the name of the metric that has the largest token of one of `KL_METRICS`."""
    return f"{name}_max"
