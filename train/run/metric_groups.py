"""The groups of metrics, by which TensorBoard and the page of a run order them."""

import re

GROUPS = (
    ("reward", r"reward|correct|accuracy.*|.*_reward|finished|completion_length"),
    ("kl", r"kl_.*|ppo_kl"),
    ("mismatch", r"rollout_kl|rollout_log_prob_error|mismatch_.*|routing_.*|correction_.*"),
    ("policy", r"entropy|router_entropy|clip_fraction.*|loss|.*_loss|grad_norm"),
    ("guard", r"skipped_updates|updates_beyond_limit"),
    ("rollout", r"rollout_.*|packed_.*"),
)
"""Name of each group, and a pattern of its metrics; the first that matches a whole name counts."""


def group_of(metric: str) -> str:
    """Returns the group of a metric; rewards of a task, which have names of their own, are in `other`.

    Example:
        >>> group_of("kl_reference"), group_of("grad_norm"), group_of("format")
        ('kl', 'policy', 'other')
    """
    return next((name for name, pattern in GROUPS if re.fullmatch(pattern, metric)), "other")


def tag_of(metric: str) -> str:
    """Returns the name with which trackers group a metric, `group/metric`; `time/...` has its group already."""
    return metric if "/" in metric else f"{group_of(metric)}/{metric}"
