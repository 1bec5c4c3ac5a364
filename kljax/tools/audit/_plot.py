"""Plots an audit: bias and signal-to-noise of values and of gradients, one line per estimator and place."""

import importlib.util
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from kljax.tools.audit.results import Interval, Result, select

# A logarithmic axis has no 0: a smaller bias or signal is drawn at this edge.
FLOOR = 1e-6


def have_matplotlib() -> bool:
    """Tells whether matplotlib is installed, without importing it."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(results: Sequence[Result], title: str, path: pathlib.Path) -> pathlib.Path:
    """Draws the exact and recorded results into a PNG file.

    Args:
      results: of an audit; sampled ones are left out.
      path: of the file, which is overwritten; its directory exists.

    Raises:
      ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the plot of an audit needs matplotlib: pip install matplotlib") from error

    kinds = [(kind, _lines(results, kind)) for kind in ("value", "gradient", "coefficient")]
    kinds = [(kind, lines) for kind, lines in kinds if lines]
    heights = [1 + len(lines) for _, lines in kinds]
    figure = Figure(figsize=(12, 1 + 0.22 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(kinds), 2, squeeze=False, height_ratios=heights)
    for (left, right), (kind, lines) in zip(grid, kinds, strict=True):
        recorded = lines[0][1][0].how == "recorded"
        metrics = ("relative_difference", "root_mean_square") if kind == "coefficient" else ("relative_bias", "snr")
        _panel(left, lines, "bias" if recorded and kind == "value" else metrics[0], kind)
        _panel(right, lines, metrics[1], kind)
        right.set_yticklabels([])
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return path


def _lines(results: Sequence[Result], kind: str) -> list[tuple[str, list[Result]]]:
    """Groups results into the lines of a panel: a label, and its results per token and per sequence."""
    lines: dict[str, list[Result]] = {}
    for result in select(results, kind=kind):
        if result.how != "sampled":
            parts = [result.place, result.estimator, "" if result.correction == "none" else f"({result.correction})"]
            lines.setdefault(" ".join(part for part in parts if part), []).append(result)
    return list(lines.items())


def _panel(axes: Any, lines: list[tuple[str, list[Result]]], metric: str, kind: str) -> None:
    for level, colour, marker in (("token", "tab:blue", "o"), ("sequence", "tab:orange", "s")):
        points = [
            (height, result.metrics[metric])
            for height, (_, results) in enumerate(lines)
            for result in results
            if result.level == level and not math.isnan(result.metrics[metric].value)
        ]
        heights = [height for height, _ in points]
        ends = [_ends(interval) for _, interval in points]
        axes.hlines(heights, [low for low, _ in ends], [high for _, high in ends], color=colour, linewidth=3, alpha=0.4)
        sizes = [max(abs(interval.value), FLOOR) for _, interval in points]
        axes.plot(sizes, heights, marker, color=colour, markersize=4, label=f"per {level}")
    set_log_axis(axes)
    axes.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=7)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.grid(visible=True, alpha=0.3)
    axes.set_title(f"{kind}: {metric.replace('_', ' ')} (size; {FLOOR:g} is 0)", fontsize=9)
    if metric == "snr":
        axes.legend(fontsize=7)


def set_log_axis(axes: Any) -> None:
    """Makes the horizontal axis logarithmic, with ticks at powers of ten, or at 1, 2 and 5 of them if it has few."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _ends(interval: Interval) -> tuple[float, float]:
    """Returns the interval of the absolute value; both ends are the number itself if it has no interval."""
    ends = [abs(end) for end in (interval.low, interval.high) if math.isfinite(end)] or [abs(interval.value)]
    low = FLOOR if interval.low < 0 < interval.high else min(ends)
    return max(low, FLOOR), max(*ends, FLOOR)
