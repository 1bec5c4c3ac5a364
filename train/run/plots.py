"""The four curves of a run, from its metrics."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train.run.metrics import FILE_NAME, read_metrics


class Panel(NamedTuple):
    """A metric of the train phase with its title and the label of its axis."""

    metric: str
    title: str
    label: str


PANELS = (
    Panel("reward", "Reward", "mean per completion"),
    Panel("kl_reference", "KL to the reference: KL(policy || reference)", "nats per token"),
    Panel("rollout_kl", "Rollout KL: trainer against sampler", "nats per token"),
    Panel("entropy", "Entropy of the policy", "nats per token"),
)


def _series(records: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    # A null stays in the series as NaN, so that the line shows the gap.
    points = [(r["step"], r[metric]) for r in records if r["phase"] == "train" and metric in r]
    return [step for step, _ in points], [math.nan if value is None else value for _, value in points]


def _draw(axes: Axes, panel: Panel, steps: list[int], values: list[float]) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel("step")
    axes.set_ylabel(panel.label)
    if not any(math.isfinite(value) for value in values):
        note = "no finite value" if values else "not recorded in this run"
        axes.text(0.5, 0.5, note, ha="center", va="center", transform=axes.transAxes, color="0.4")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    marker = "o" if len(values) <= 20 else None
    axes.plot(steps, values, linewidth=1.2, marker=marker, markersize=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)


def write_curves(run_directory: str | Path) -> Path:
    """Draw `curves.png` in `run_directory` from its `metrics.jsonl`; a metric that was not recorded has a note instead.

    Raises:
        UserError: there is no readable `metrics.jsonl`.
    """
    directory = Path(run_directory)
    records = read_metrics(directory / FILE_NAME)
    # A figure of its own, without pyplot: no display, no global state, whatever backend the user has set.
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(directory.resolve().name)
    for axes, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        _draw(axes, panel, *_series(records, panel.metric))
    path = directory / "curves.png"
    figure.savefig(path, dpi=110)
    return path
