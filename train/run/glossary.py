"""The metrics of a run, from `metrics.yaml`, and the lookup by the names that are logged."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

from train.config.yaml_text import parse_yaml


class MetricEntry(NamedTuple):
    """A metric, or several with a number in their name; `metrics.yaml` says what each field holds."""

    group: str
    name: str
    meaning: str
    healthy: str
    sick: str

    def matches(self, metric: str) -> bool:
        """Whether a logged name is of this metric."""
        return bool(re.fullmatch(re.sub(r"(?<=_)[NK](?=_|$)", r"\\d+", self.name), metric))


FILE = Path(__file__).with_name("metrics.yaml")
GLOSSARY = tuple(
    MetricEntry(group, name, **texts)
    for group, metrics in parse_yaml(FILE.read_text(encoding="utf-8"))[0].items()
    for name, texts in metrics.items()
)


@functools.cache  # the step loop asks for every metric of every step
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
