"""An audit as a picture: bias and signal-to-noise of values and of gradients, one line per estimator and place."""

import importlib.util
import math
import pathlib
from typing import Any

from kljax.audit.report import Audit, Interval, Result

# A signal or a bias below this is drawn at the edge: a logarithmic axis has no place for 0.
FLOOR = 1e-6


def have_matplotlib() -> bool:
    """Whether a plot can be drawn at all; nothing is imported yet."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(audit: Audit, path: pathlib.Path) -> pathlib.Path:
    """Draws the results that are not sampled into a PNG file.

    Raises:
      ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the plot of an audit needs matplotlib: pip install matplotlib") from error

    kinds = [(kind, _lines(audit, kind)) for kind in ("value", "gradient", "coefficient")]
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
    figure.suptitle(f"KL audit against {audit.yardstick}")
    figure.savefig(path, dpi=120)
    return path


def _lines(audit: Audit, kind: str) -> list[tuple[str, list[Result]]]:
    """Label and results, per token and per sequence, of each line of a panel."""
    lines: dict[str, list[Result]] = {}
    for result in audit.select(kind=kind):
        if result.how != "sampled":
            parts = [result.place, result.estimator, "" if result.correction == "none" else f"({result.correction})"]
            lines.setdefault(" ".join(part for part in parts if part), []).append(result)
    return list(lines.items())


def _panel(axes: Any, lines: list[tuple[str, list[Result]]], metric: str, kind: str) -> None:
    for level, colour, marker in (("token", "tab:blue", "o"), ("sequence", "tab:orange", "s")):
        found = [
            (height, result.metrics[metric])
            for height, (_, results) in enumerate(lines)
            for result in results
            if result.level == level and not math.isnan(result.metrics[metric].value)
        ]
        heights = [height for height, _ in found]
        ends = [_ends(interval) for _, interval in found]
        axes.hlines(heights, [low for low, _ in ends], [high for _, high in ends], color=colour, linewidth=3, alpha=0.4)
        sizes = [max(abs(interval.value), FLOOR) for _, interval in found]
        axes.plot(sizes, heights, marker, color=colour, markersize=4, label=f"per {level}")
    axes.set_xscale("log")
    axes.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=7)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.grid(visible=True, alpha=0.3)
    axes.set_title(f"{kind}: {metric.replace('_', ' ')} (size; {FLOOR:g} is 0)", fontsize=9)
    if metric == "snr":
        axes.legend(fontsize=7)


def _ends(found: Interval) -> tuple[float, float]:
    """The interval of the size of a number; where there is none, the number itself."""
    ends = [abs(end) for end in (found.low, found.high) if math.isfinite(end)] or [abs(found.value)]
    low = FLOOR if found.low < 0 < found.high else min(ends)
    return max(low, FLOOR), max(*ends, FLOOR)
