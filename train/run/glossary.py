"""Looks up metrics in their table, by the names that are logged."""

from train.run.metric_table import GLOSSARY, MetricEntry

__all__ = ["GLOSSARY", "MetricEntry", "group_of", "metric_of", "tag_of"]


def metric_of(name: str) -> MetricEntry | None:
    """Returns the entry of a logged name; None for a reward of a task."""
    return next((metric for metric in GLOSSARY if metric.matches(name)), None)


def group_of(name: str) -> str:
    """Returns the group of a metric; rewards of a task, which have names of their own, are in `other`.

    Example:
        >>> group_of("kl_reference"), group_of("grad_norm"), group_of("format")
        ('kl', 'policy', 'other')
    """
    metric = metric_of(name)
    return "other" if metric is None else metric.group


def tag_of(name: str) -> str:
    """Returns the name with which trackers group a metric, `group/metric`; `time/...` has its group already."""
    return name if "/" in name else f"{group_of(name)}/{name}"
