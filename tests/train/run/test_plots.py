import math

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from train.config.errors import UserError
from train.run.metrics import MetricsWriter
from train.run.plots import PANELS, Panel, draw_curves, write_curves


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    save = Figure.savefig

    def spy(figure, *args, **kwargs):
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return figures


def record(directory, metrics, steps=5):
    writer = MetricsWriter(directory)
    writer.write("warm_start", 1, {"entropy": 99.0})
    for step in range(1, steps + 1):
        writer.write("train", step, {name: function(step) for name, function in metrics.items()})
    writer.write("eval", steps, {"reward": 99.0, "accuracy": 83.0})
    writer.close()


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_six_panels_show_their_phase_with_labels(tmp_path, drawn):
    record(tmp_path, {panel.metric: lambda step, scale=i: step * scale for i, panel in enumerate(PANELS)})
    path = write_curves(tmp_path)
    assert path == tmp_path / "curves.png"
    assert matplotlib.image.imread(path).shape[:2] == (770, 1815)
    axes = drawn[0].axes
    kls = ["kl_reference", "kl_reference_max", "rollout_kl"]
    assert [panel.metric for panel in PANELS] == ["reward", "accuracy", "entropy", *kls]
    assert [panel.log for panel in PANELS] == [False] * 3 + [True] * 3
    assert len(axes) == 6
    for scale, panel in enumerate(axes):
        steps = [5] if scale == 1 else [1, 2, 3, 4, 5]
        assert list(panel.lines[0].get_xdata()) == steps
        assert list(panel.lines[0].get_ydata()) == [83.0] if scale == 1 else [step * scale for step in steps]
        assert panel.get_xlabel() == "step"
        assert panel.get_yscale() == ("log" if scale > 2 else "linear")
        assert texts(panel) == []
    assert [panel.get_ylabel() for panel in axes][:4] == ["mean per completion", "%"] + ["nats per token"] * 2


def test_spike_is_marked_and_small_differences_stay_visible(tmp_path, drawn):
    def run(kl, spike=None):
        values = dict.fromkeys(range(1, 101), kl) | ({} if spike is None else {40: spike})
        return [{"phase": "train", "step": step, "kl_reference": value} for step, value in values.items()]

    draw_curves({"with": run(0.1), "without": run(3.0, 1.2e13)}, tmp_path / "kl.png")
    axes = drawn[0].axes[3]
    low, high = axes.get_ylim()
    # The distance of the two lines is at least a third of the height.
    assert math.log(3.0 / 0.1) > math.log(high / low) / 3
    marks = [line for line in axes.lines if line.get_marker() == "^"]
    assert [list(line.get_xdata()) for line in marks] == [[], [40]]
    assert texts(axes) == ["triangles: beyond the axis, up to 1.2e+13"]
    # Only the faint line has the spike.
    raw, smooth = axes.lines[2], axes.lines[3]
    assert (max(raw.get_ydata()), max(smooth.get_ydata())) == (1.2e13, 3.0)
    assert raw.get_alpha() < smooth.get_alpha() if smooth.get_alpha() else raw.get_alpha() < 1


def test_exact_kl_is_plotted_without_an_estimate(tmp_path, drawn):
    record(tmp_path, {"kl_reference_exact": lambda step: 0.1 * step, "kl_reference_exact_max": lambda step: 2.0 * step})
    write_curves(tmp_path)
    mean, largest = drawn[0].axes[3:5]
    assert list(mean.lines[0].get_ydata()) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert list(largest.lines[0].get_ydata()) == [2.0, 4.0, 6.0, 8.0, 10.0]


def test_kl_without_positive_values_is_plotted(tmp_path, drawn):
    record(tmp_path, {"kl_reference": lambda step: 0.0})
    write_curves(tmp_path)
    assert drawn[0].axes[3].get_yscale() == "linear"


def test_missing_and_non_finite_series_have_a_note(tmp_path, drawn):
    record(tmp_path, {"reward": float, "entropy": lambda step: math.nan})
    write_curves(tmp_path)
    reward, _, entropy, kl_reference, _, rollout_kl = drawn[0].axes
    assert len(reward.lines) == 2
    assert texts(kl_reference) == texts(rollout_kl) == ["not recorded in this run"]
    assert texts(entropy) == ["no finite value"]
    assert not kl_reference.lines


def test_a_null_is_a_gap(tmp_path, drawn):
    record(tmp_path, {"reward": lambda step: math.inf if step == 2 else step})
    write_curves(tmp_path)
    assert [math.isnan(value) for value in drawn[0].axes[0].lines[0].get_ydata()] == [False, True, False, False, False]


def test_run_without_any_metric_is_still_plotted(tmp_path, drawn):
    (tmp_path / "metrics.jsonl").write_text("")
    assert write_curves(tmp_path).exists()
    assert [texts(axes) for axes in drawn[0].axes] == [["not recorded in this run"]] * 6


def test_a_directory_without_metrics_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl"):
        write_curves(tmp_path)


def test_several_runs_share_panels_with_a_legend(tmp_path, drawn):
    with_kl = [{"phase": "train", "step": step, "reward": 0.5 * step} for step in (1, 2)]
    without = [{"phase": "train", "step": step, "reward": 1.0 * step} for step in (1, 2, 3)]
    evaluations = [{"phase": "eval", "step": 2, "accuracy": 90.0}]
    panels = (Panel("accuracy", "Accuracy", "%", "eval"), *PANELS[:3])
    draw_curves({"with": [*with_kl, *evaluations], "without": without}, tmp_path / "both.png", panels)
    accuracy, reward, *_ = drawn[0].axes
    assert [list(line.get_ydata()) for line in accuracy.lines[::2]] == [[90.0], []]
    assert [list(line.get_ydata()) for line in reward.lines[::2]] == [[0.5, 1.0], [1.0, 2.0, 3.0]]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["with", "without"]
    assert (tmp_path / "both.png").exists()
