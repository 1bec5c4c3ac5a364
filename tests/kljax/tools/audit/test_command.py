"""`python -m kljax audit` from files to the report, and its mistakes."""

import itertools
import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from matplotlib.figure import Figure

import kljax
from kljax.__main__ import main
from kljax.tools.audit import _plot, report

SHAPE = (3, 2, 4)


@pytest.fixture
def files(tmp_path: pathlib.Path) -> pathlib.Path:
    """Logits of three policies, a batch and two checkpoints of a table of logits."""
    rng = np.random.default_rng(0)
    for name in ("policy", "ref", "rollout"):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=SHAPE).astype(np.float32))
    batch = {name: -1 + 0.1 * rng.normal(size=(3, 5)) for name in ("log_probs", "ref_log_probs", "rollout_log_probs")}
    np.savez(tmp_path / "batch.npz", mask=np.ones((3, 5)), **batch)
    np.savez(tmp_path / "no_mask.npz", **batch)
    np.savez(tmp_path / "with_kl.npz", mask=np.ones((3, 5)), kl=0.1 * rng.random((3, 5)), **batch)
    np.save(tmp_path / "other.npy", rng.normal(size=(3, 2, 5)))
    np.save(tmp_path / "tokens.npy", rng.integers(0, 4, size=(3, 2)))
    (tmp_path / "text.npy").write_text("no array")
    return tmp_path


def audit(*arguments: str | pathlib.Path) -> int:
    return main(["audit", *map(str, arguments), "--bootstrap", "10"])


def test_logits(files: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = files / "deep" / "out"
    arguments = ("--logits", files / "policy.npy", "--ref-logits", files / "ref.npy", "--out", out)
    assert audit(*arguments, "--rollout-logits", files / "rollout.npy", "--max-ratio", "1.5") == 0
    printed = capsys.readouterr().out
    written = json.loads((out / "audit.json").read_text())
    assert (out / "audit.txt").read_text().strip() in printed
    assert max(map(len, (out / "audit.txt").read_text().splitlines())) <= 120
    assert (out / "audit.png").read_bytes().startswith(b"\x89PNG")
    arrays = [np.load(files / f"{name}.npy") for name in ("policy", "ref", "rollout")]
    same = kljax.audit.audit_logits(*arrays, bootstrap=10, max_ratio=1.5).to_dict()
    assert written["settings"]["precision"] == "float64"
    assert len(written["results"]) == len(same["results"]) == 2 * 3 * (5 + 21)
    for actual, expected in zip(written["results"], same["results"], strict=True):
        assert actual == expected


def test_batch_and_example(
    files: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert audit("--batch", files / "batch.npz", "--out", files / "batch") == 0
    recorded = json.loads((files / "batch" / "audit.json").read_text())
    assert recorded["settings"]["policy"] == "off-policy"
    assert "importance ratio" in recorded["yardstick"]
    assert (files / "batch" / "audit.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(report, "have_matplotlib", lambda: False)  # the plots of both kinds are drawn by now
    sizes = ("--rows", "3", "--length", "2", "--vocabulary", "4")
    assert audit("--example", *sizes, "--kl", "0.2", "--draws", "3", "--out", files / "example") == 0
    assert json.loads((files / "example" / "audit.json").read_text())["kl"]["token"]["value"] == pytest.approx(0.2)
    printed = capsys.readouterr().out
    assert "Which estimator in which place" in printed
    assert "(sampled)" in printed


def test_command_asks_for_the_meaning_of_recorded_kl(
    files: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "have_matplotlib", lambda: False)
    assert audit("--batch", files / "with_kl.npz", "--out", files / "no") == 2
    assert "has kl, expected --kl-is with it; pass --kl-is exact if" in capsys.readouterr().err
    assert not (files / "no").exists()
    yardsticks = {"exact": "the exact KL(policy || reference)", "estimate": "no exact KL is recorded"}
    for meaning, yardstick in yardsticks.items():
        assert audit("--batch", files / "with_kl.npz", "--kl-is", meaning, "--out", files / meaning) == 0
        assert yardstick in json.loads((files / meaning / "audit.json").read_text())["yardstick"]
    assert audit("--batch", files / "batch.npz", "--kl-is", "exact", "--out", files / "no") == 2
    assert "has no kl; leave the option out" in capsys.readouterr().err


def test_checkpoints(files: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "have_matplotlib", lambda: False)
    tables = {name: jnp.asarray(np.random.default_rng(i).normal(size=(4, 4))) for i, name in enumerate("ab")}
    with ocp.PyTreeCheckpointer() as checkpointer:
        for name, table in tables.items():
            checkpointer.save(files / name, {"model": {"table": table}})
    (files / "tiny_model.py").write_text("def logits(params, tokens):\n    return params['table'][tokens]\n")
    monkeypatch.syspath_prepend(str(files))
    arguments = ("--checkpoints", files / "a", files / "b", "--tokens", files / "tokens.npy", "--item", "model")
    assert audit(*arguments, "--apply", "tiny_model:logits", "--out", files / "out") == 0
    sys.modules.pop("tiny_model")
    tokens = np.load(files / "tokens.npy")
    same = kljax.audit.audit_logits(*(table[tokens] for table in tables.values()), bootstrap=10).to_dict()
    recorded = json.loads((files / "out" / "audit.json").read_text())
    for actual, expected in zip(recorded["results"], same["results"], strict=True):
        for name, metric in expected["metrics"].items():
            assert actual["metrics"][name]["value"] == pytest.approx(metric["value"], rel=1e-9, abs=1e-12)
    (files / "tiny_parts.py").write_text(
        "import jax\n"
        "def states(params, tokens):\n    return jax.nn.one_hot(tokens, 4)\n"
        "def head(params):\n    return params['table']\n"
    )
    parts = ("--apply", "tiny_parts:states", "--head", "tiny_parts:head")
    assert audit(*arguments, *parts, "--out", files / "parts") == 0
    sys.modules.pop("tiny_parts")
    recorded = json.loads((files / "parts" / "audit.json").read_text())
    assert recorded["kl"]["token"]["value"] == pytest.approx(same["kl"]["token"]["value"], rel=1e-9)
    with pytest.raises(ValueError, match="apply: got shape"):
        kljax.audit.audit_checkpoints(
            tokens,
            checkpoints=kljax.audit.Checkpoints(files / "a", files / "b", item="model"),
            apply=lambda params, _: params["table"],
        )
    assert audit(*arguments[:5], "--apply", "tiny_model:logits", "--item", "none", "--out", files / "no") == 2
    capsys.readouterr()
    assert audit(*arguments, "--apply", "math:sqrt", "--out", files / "no") == 2
    assert "--apply: math:sqrt raised TypeError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "expected one of --logits, --batch, --checkpoints, --example, got none"),
        ("--logits policy.npy", "needs --ref-logits"),
        ("--logits policy.npy --ref-logits ref.npy --example", "got --logits and --example"),
        ("--logits policy.npy --ref-logits gone.npy", "there is no file gone.npy"),
        ("--logits text.npy --ref-logits ref.npy", "cannot be read as a NumPy file"),
        ("--logits batch.npz --ref-logits ref.npy", "holds several arrays"),
        ("--logits policy.npy --ref-logits other.npy", "shapes differ"),
        ("--logits policy.npy --ref-logits ref.npy --draws 1", "draws"),
        ("--logits policy.npy --ref-logits ref.npy --confidence 3", "confidence"),
        ("--logits policy.npy --ref-logits ref.npy --rollout-logits rollout.npy --max-ratio inf", "max_ratio: got inf"),
        ("--batch batch.npz --max-ratio inf", "max_ratio: got inf"),
        ("--batch policy.npy", "expected an .npz file"),
        ("--batch no_mask.npz", "has no mask; it has log_probs, ref_log_probs, rollout_log_probs"),
        ("--checkpoints a b", "needs --apply and --tokens"),
        ("--checkpoints a b --tokens tokens.npy --apply nothing", "expected module:function"),
        ("--checkpoints a b --tokens tokens.npy --apply no_such_module:f", "No module named"),
        ("--checkpoints a b --tokens tokens.npy --apply math:pi", "is not a function"),
        ("--checkpoints a b --tokens tokens.npy --apply math:sqrt", "no checkpoint at"),
    ],
)
def test_mistakes_are_named_and_write_nothing(
    arguments: str,
    message: str,
    files: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(files)
    assert audit(*arguments.split(), "--out", "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not (files / "out").exists()


def test_reports_go_to_the_folder_audit_by_default(files: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setattr(report, "have_matplotlib", lambda: False)
    assert audit("--batch", "batch.npz") == 0
    assert (files / "audit" / "audit.txt").exists()


def test_out_must_be_a_folder(files: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("--batch", files / "batch.npz", "--out", files / "policy.npy") == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [(0.2, 4), (0.003, 0.8), (1e-6, 2)])
def test_labels_of_a_log_axis_stay_apart(ends: tuple[float, float]) -> None:
    axes = Figure(figsize=(6, 2)).subplots()
    axes.plot(ends, [0, 1])
    _plot.set_log_axis(axes)
    axes.figure.canvas.draw()
    ticks = axes.xaxis.get_majorticklabels() + axes.xaxis.get_minorticklabels()
    low, high = axes.bbox.intervalx
    boxes = [tick.get_window_extent() for tick in ticks if tick.get_text()]
    spans = sorted((box.x0, box.x1) for box in boxes if low <= (box.x0 + box.x1) / 2 <= high)
    assert len(spans) >= 3
    assert all(first[1] + 3 < second[0] for first, second in itertools.pairwise(spans))


def test_missing_matplotlib_leaves_a_report_and_a_note(
    files: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert audit("--batch", files / "batch.npz", "--out", files / "out") == 0
    assert sorted(path.name for path in (files / "out").iterdir()) == ["audit.json", "audit.txt"]
    assert "pip install matplotlib" in capsys.readouterr().out
    with pytest.raises(ImportError, match="pip install matplotlib"):
        _plot.draw((), "nothing", files / "plot.png")
