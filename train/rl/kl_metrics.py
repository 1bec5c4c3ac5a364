"""The names of the two measurements of KL(policy || reference); no JAX, for reports and plots."""

KL_ESTIMATE = "kl_reference"
"""The mean of k3 over the sampled tokens. It jumps at a token that the policy has nearly dropped."""
KL_EXACT = "kl_reference_exact"
"""The mean over the prefixes of the KL over the whole vocabulary."""
KL_METRICS = (KL_ESTIMATE, KL_EXACT)


def largest_of(name: str) -> str:
    """Returns the name of the metric that has the largest token of one of `KL_METRICS`."""
    return f"{name}_max"
