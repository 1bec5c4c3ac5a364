"""Curves of one run or of several, from their metrics."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from train.run.metrics import FILE_NAME, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[Mapping[str, Any]]


class Panel(NamedTuple):
    """A metric of one phase with the title of its panel and the label of its axis."""

    metric: str
    title: str
    label: str
    phase: str = "train"


PANELS = (
    Panel("reward", "Reward", "mean per completion"),
    Panel("kl_reference", "KL to the reference: KL(policy || reference)", "nats per token"),
    Panel("rollout_kl", "Rollout KL: trainer against sampler", "nats per token"),
    Panel("entropy", "Entropy of the policy", "nats per token"),
)


def write_curves(run_directory: str | Path) -> Path:
    """Draws `curves.png` in `run_directory` from its `metrics.jsonl`; a metric that was not recorded has a note.

    Raises:
      UserError: there is no readable `metrics.jsonl`.
    """
    directory = Path(run_directory)
    records = read_metrics(directory / FILE_NAME)
    return draw_curves({directory.resolve().name: records}, directory / "curves.png")


def draw_curves(
    runs: Mapping[str, Records], path: str | Path, panels: Sequence[Panel] = PANELS, *, dpi: int = 110
) -> Path:
    """Draws four panels with one line per run, and saves the picture at `path`.

    Args:
      runs: the records of each run by its label. One label is the title; several make a legend.
      path: the PNG file.
      panels: four panels, row by row.
      dpi: dots per inch of the 11 x 7 inches.

    Returns:
      `path`.
    """
    # Loaded here, as it takes a fifth of the time in which a command starts.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A separate figure, without pyplot: no display, no global state, whatever backend the user has set.
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(2, 2).flat, panels, strict=True):
        _draw(axes, panel, {label: _series(records, panel) for label, records in runs.items()})
    if len(runs) == 1:
        figure.suptitle(next(iter(runs)))
    else:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(runs), frameon=False)
    figure.savefig(path, dpi=dpi)
    return Path(path)


def _series(records: Records, panel: Panel) -> tuple[list[int], list[float]]:
    # A null stays in the series as NaN, so that the line shows the gap.
    points = [(r["step"], r[panel.metric]) for r in records if r["phase"] == panel.phase and panel.metric in r]
    return [step for step, _ in points], [math.nan if value is None else value for _, value in points]


def _draw(axes: "Axes", panel: Panel, lines: Mapping[str, tuple[list[int], list[float]]]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.title)
    axes.set_xlabel("step")
    axes.set_ylabel(panel.label)
    if not any(math.isfinite(value) for _, values in lines.values() for value in values):
        note = "no finite value" if any(values for _, values in lines.values()) else "not recorded in this run"
        axes.text(0.5, 0.5, note, ha="center", va="center", transform=axes.transAxes, color="0.4")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    for label, (steps, values) in lines.items():
        marker = "o" if len(values) <= 20 else None
        axes.plot(steps, values, linewidth=1.2, marker=marker, markersize=3, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
