"""Both anchors of a KL term, audited at several lags of the sampler."""

import json
import pathlib

import jax
import numpy as np
import pytest

import kljax
from kljax.__main__ import main

POLICY, REF, STALE, STALER = np.asarray(jax.random.normal(jax.random.key(0), (4, 8, 3, 5)))
SAMPLERS = {4: STALER, 0: POLICY, 1: STALE}


def test_each_anchor_has_the_audit_of_its_logits() -> None:
    measured = kljax.audit.audit_anchors(POLICY, REF, SAMPLERS, bootstrap=0)
    assert list(measured.audits) == [
        ("reference", 0),
        ("reference", 1),
        ("reference", 4),
        ("sampler", 1),
        ("sampler", 4),
    ]
    for (anchor, lag), audit in measured.audits.items():
        other = SAMPLERS[lag] if anchor == "sampler" else REF
        expected = kljax.audit.audit_logits(POLICY, other, SAMPLERS[lag] if lag else None, bootstrap=0)
        assert audit.table() == expected.table()


def test_ratio_removes_the_bias_of_both_anchors() -> None:
    measured = kljax.audit.audit_anchors(POLICY, REF, SAMPLERS, bootstrap=0)
    for (_, lag), audit in measured.audits.items():
        correction = {"correction": "ratio"} if lag else {}
        for labels in ({"kind": "value", "estimator": "k1"}, {"place": "straight_through"}):
            result = audit.find(level="token", how="exact", **labels, **correction)
            assert abs(result.metrics["relative_bias"].value) < 1e-4
        stale = audit.find(kind="value", level="token", how="exact", estimator="k1", correction="none")
        assert (abs(stale.metrics["relative_bias"].value) > 0.01) == (lag > 0)


def test_command_writes_both_anchors(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--vocabulary", "30", "--rows", "8", "--length", "2", "--bootstrap", "0"]
    assert main(["audit", "--example", "--lags", "0", "2", *sizes, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    text = (tmp_path / "anchors.txt").read_text()
    assert printed.startswith(text)
    assert all(len(line) <= 120 for line in text.splitlines())
    anchors = json.loads((tmp_path / "anchors.json").read_text())["anchors"]
    assert [(entry["anchor"], entry["lag"]) for entry in anchors] == [
        ("reference", 0),
        ("reference", 2),
        ("sampler", 2),
    ]
    np.testing.assert_allclose([entry["kl"]["token"]["value"] for entry in anchors], [0.1, 0.1, 0.004], 1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--example", "--lags", "-1"], "--lags: got lags [-1]"),
        (["--example", "--lags", "1", "--staleness", "0.1"], "no --staleness"),
        (["--logits", "x.npy", "--lags", "1"], "--lags: only with --example"),
    ],
)
def test_wrong_lags_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *options]) == 2
    assert message in capsys.readouterr().err


def test_audit_of_anchors_needs_a_lag() -> None:
    with pytest.raises(ValueError, match="sampling_logits: got lags"):
        kljax.audit.audit_anchors(POLICY, REF, {})


def test_lag_without_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="sampling_logits: got None at lag 4, expected logits; only lag 0 needs none"):
        kljax.audit.audit_anchors(POLICY, REF, {0: None, 4: None})
