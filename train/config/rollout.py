"""Where completions come from."""

from train.config.types import Count, Section


class Rollout(Section):
    prompts_per_step: Count = 16
    """Prompts of one rollout batch."""
    samples_per_prompt: Count = 8
    """Completions of each prompt: the group of the group estimators."""
    record_log_probs: bool = True
    """Keep the sampler's log-probs (rollout_log_probs)."""
