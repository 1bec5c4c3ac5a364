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
    writer.write("eval", steps, {"reward": 99.0})
    writer.close()


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_four_panels_show_the_train_phase_with_labels(tmp_path, drawn):
    record(tmp_path, {panel.metric: lambda step, scale=i: step * scale for i, panel in enumerate(PANELS)})
    path = write_curves(tmp_path)
    assert path == tmp_path / "curves.png"
    assert matplotlib.image.imread(path).shape[:2] == (770, 1210)
    axes = drawn[0].axes
    assert [panel.metric for panel in PANELS] == ["reward", "kl_reference", "rollout_kl", "entropy"]
    assert len(axes) == 4
    for scale, panel in enumerate(axes):
        assert list(panel.lines[0].get_xdata()) == [1, 2, 3, 4, 5]
        assert list(panel.lines[0].get_ydata()) == [step * scale for step in range(1, 6)]
        assert panel.get_xlabel() == "step"
        assert texts(panel) == []
    assert [panel.get_ylabel() for panel in axes] == ["mean per completion"] + ["nats per token"] * 3


def test_a_missing_series_and_one_without_a_finite_value_have_a_note(tmp_path, drawn):
    record(tmp_path, {"reward": float, "entropy": lambda step: math.nan})
    write_curves(tmp_path)
    reward, kl_reference, rollout_kl, entropy = drawn[0].axes
    assert len(reward.lines) == 1
    assert texts(kl_reference) == texts(rollout_kl) == ["not recorded in this run"]
    assert texts(entropy) == ["no finite value"]
    assert not kl_reference.lines


def test_a_null_is_a_gap(tmp_path, drawn):
    record(tmp_path, {"reward": lambda step: math.inf if step == 2 else step})
    write_curves(tmp_path)
    assert [math.isnan(value) for value in drawn[0].axes[0].lines[0].get_ydata()] == [False, True, False, False, False]


def test_a_run_without_any_metric_is_still_drawn(tmp_path, drawn):
    (tmp_path / "metrics.jsonl").write_text("")
    assert write_curves(tmp_path).exists()
    assert all(texts(axes) == ["not recorded in this run"] for axes in drawn[0].axes)


def test_a_directory_without_metrics_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl"):
        write_curves(tmp_path)


def test_several_runs_share_the_panels_and_have_a_legend(tmp_path, drawn):
    with_kl = [{"phase": "train", "step": step, "reward": 0.5 * step} for step in (1, 2)]
    without = [{"phase": "train", "step": step, "reward": 1.0 * step} for step in (1, 2, 3)]
    evaluations = [{"phase": "eval", "step": 2, "accuracy": 90.0}]
    panels = (Panel("accuracy", "Accuracy", "%", "eval"), *PANELS[:3])
    draw_curves({"with": [*with_kl, *evaluations], "without": without}, tmp_path / "both.png", panels)
    accuracy, reward, *_ = drawn[0].axes
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[90.0], []]
    assert [list(line.get_ydata()) for line in reward.lines] == [[0.5, 1.0], [1.0, 2.0, 3.0]]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["with", "without"]
    assert (tmp_path / "both.png").exists()
