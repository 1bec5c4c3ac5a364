"""Curves of one run or of several, from their metrics."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from train.rl.kl_metrics import KL_ESTIMATE, KL_EXACT, largest_of
from train.run.metrics import FILE_NAME, read_metrics
from train.storage.paths import as_path
from train.storage.uploads import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[Mapping[str, Any]]


class Panel(NamedTuple):
    """A metric of one phase with the title of its panel, the label of its axis, and whether that is logarithmic.

    Attributes:
      instead: the metric that is drawn for a run that has not recorded the first.
    """

    metric: str
    title: str
    label: str
    phase: str = "train"
    log: bool = False
    instead: str = ""


PANELS = (
    Panel("reward", "Reward", "mean per completion"),
    Panel("accuracy", "Accuracy, held out", "%", "eval"),
    Panel("entropy", "Entropy of the policy", "nats per token"),
    Panel(
        *(KL_ESTIMATE, "KL to the reference: KL(policy || reference)", "nats per token"),
        log=True,
        instead=KL_EXACT,
    ),
    Panel(
        *(largest_of(KL_ESTIMATE), "KL to the reference, largest of a token", "nats"),
        log=True,
        instead=largest_of(KL_EXACT),
    ),
    Panel("rollout_kl", "Rollout KL: trainer against sampler", "nats per token", log=True),
)
FEW = 20
"""Points of a line up to which each is marked, and none is smoothed."""
FAR = 1000.0
"""A value that is this often as large as nearly all others of a logarithmic panel lies beyond its axis."""


def write_curves(run_directory: str | Path) -> Path:
    """Draws `curves.png` in `run_directory` from its `metrics.jsonl`; a metric that was not recorded has a note.

    Raises:
      UserError: there is no readable `metrics.jsonl`.
    """
    directory = as_path(run_directory)
    records = read_metrics(directory / FILE_NAME)
    return draw_curves({directory.resolve().name: records}, directory / "curves.png")


def draw_curves(
    runs: Mapping[str, Records], path: str | Path, panels: Sequence[Panel] = PANELS, *, dpi: int = 110
) -> Path:
    """Draws two rows of panels with one line per run, and saves the picture at `path`.

    A line of more than 20 points is a running median over the points themselves, which are faint.

    Args:
      runs: the records of each run by its label. One label is the title; several make a legend.
      path: the PNG file.
      panels: an even number of panels, row by row.
      dpi: dots per inch of the picture, which is 7 inches high and 5.5 inches wide for each column.

    Returns:
      `path`.
    """
    # Loaded here, as it takes a fifth of the time in which a command starts.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A separate figure, without pyplot: no display, no global state, whatever backend the user has set.
    columns = len(panels) // 2
    figure = Figure(figsize=(5.5 * columns, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(2, columns).flat, panels, strict=True):
        _draw(axes, panel, {label: _series(records, panel) for label, records in runs.items()})
    if len(runs) == 1:
        figure.suptitle(next(iter(runs)))
    else:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(runs), frameon=False)
    with whole_file(as_path(path)) as partial:
        figure.savefig(partial, dpi=dpi, format="png")
    return as_path(path)


def _series(records: Records, panel: Panel) -> tuple[list[int], list[float]]:
    chosen = [record for record in records if record["phase"] == panel.phase]
    metric = panel.metric if any(panel.metric in record for record in chosen) else panel.instead
    # A null stays in the series as NaN, so that the line shows the gap.
    points = [(record["step"], record[metric]) for record in chosen if metric in record]
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
    for number, (label, (steps, values)) in enumerate(lines.items()):
        few = len(values) <= FEW
        color = f"C{number}"
        axes.plot(steps, values, linewidth=1.2, alpha=1 if few else 0.3, color=color)
        smooth = values if few else _running_median(values)
        axes.plot(steps, smooth, linewidth=1.2, marker="o" if few else None, markersize=3, color=color, label=label)
    if panel.log:
        _set_log_axis(axes, lines)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)


def _running_median(values: Sequence[float]) -> list[float]:
    """Returns the median of the finite values around each; a gap stays one."""
    around = len(values) // 80

    def median(index: int) -> float:
        near = [value for value in values[max(index - around, 0) : index + around + 1] if math.isfinite(value)]
        return statistics.median(near) if math.isfinite(values[index]) else math.nan

    return [median(index) for index in range(len(values))]


def _set_log_axis(axes: "Axes", lines: Mapping[str, tuple[list[int], list[float]]]) -> None:
    """Makes the axis logarithmic, if a value is positive; marks values that are too far off for the rest to be seen."""
    positive = [sorted(value for value in values if 0 < value < math.inf) for _, values in lines.values()]
    positive = [values for values in positive if values]
    if not positive:
        return
    axes.set_yscale("log", nonpositive="mask")
    # Of each line, so that one run that is far off is seen whole beside one that is not.
    low = min(values[len(values) // 50] for values in positive)
    high = max(values[len(values) - 1 - len(values) // 20] for values in positive)
    largest = max(values[-1] for values in positive)
    if largest <= FAR * high:
        axes.set_ylim(low / 2, 2 * largest)
        return
    top = 10 * high
    axes.set_ylim(low / 2, top)
    for number, (steps, values) in enumerate(lines.values()):
        beyond = [step for step, value in zip(steps, values, strict=True) if value > top]
        axes.plot(beyond, [top] * len(beyond), "^", color=f"C{number}", markersize=6, clip_on=False)
    note = f"triangles: beyond the axis, up to {largest:.1e}"
    axes.text(0.02, 0.96, note, va="top", transform=axes.transAxes, fontsize="small", color="0.3")
