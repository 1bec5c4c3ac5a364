"""Checkpoints by hidden states and head: what their logits give, without the logits of more than a few positions."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import kljax
from kljax.tools.audit import Audit, checkpoints

# Four tokens, as in the other tests of the audit, which so share its programs.
ROWS, LENGTH, WIDTH, VOCABULARY = 5, 30, 6, 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Three checkpoints of an embedding and a head."""
    rng, root = np.random.default_rng(0), tmp_path_factory.mktemp("checkpoints")
    paths = {name: root / name for name in ("policy", "ref", "rollout")}
    table, head = rng.normal(size=(VOCABULARY, WIDTH)), rng.normal(size=(WIDTH, VOCABULARY))
    with ocp.PyTreeCheckpointer() as checkpointer:
        for path in paths.values():
            moved = {
                "table": table + 0.3 * rng.normal(size=table.shape),
                "head": head + 0.3 * rng.normal(size=head.shape),
            }
            checkpointer.save(path, jax.tree.map(jnp.asarray, moved))
    return paths


TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, LENGTH))
MASK = np.random.default_rng(2).random((ROWS, LENGTH)) < 0.6


def hidden(params, tokens):
    return jnp.tanh(jnp.cumsum(params["table"][tokens], axis=1))


def logits(params, tokens):
    return hidden(params, tokens) @ params["head"]


def audit_of(saved: dict[str, pathlib.Path], stale: bool = False, **options) -> Audit:
    paths = kljax.audit.Checkpoints(saved["policy"], saved["ref"], saved["rollout"] if stale else None)
    return kljax.audit.audit_checkpoints(TOKENS, MASK, checkpoints=paths, bootstrap=0, rows_per_call=2, **options)


@pytest.mark.parametrize(("stale", "draws"), [(False, 3), (True, 0)])
@pytest.mark.parametrize("layout", ["dv", "vd"])
def test_hidden_states_give_the_report_of_logits(saved, stale, draws, layout) -> None:
    def head(params):
        return params["head"] if layout == "dv" else params["head"].T

    by_logits = audit_of(saved, stale, draws=draws, apply=logits)
    by_hidden = audit_of(saved, stale, draws=draws, apply=hidden, head=head, head_layout=layout)
    assert by_hidden.kl["token"].value > 0.01
    assert by_hidden.settings == by_logits.settings
    np.testing.assert_allclose(by_hidden.kl["token"].value, by_logits.kl["token"].value, rtol=1e-12)
    for actual, expected in zip(by_hidden.results, by_logits.results, strict=True):
        for name, metric in expected.metrics.items():
            np.testing.assert_allclose(actual.metrics[name].value, metric.value, rtol=1e-8, atol=1e-11)


def test_wrong_reference_kl_doubles_every_estimator(saved, monkeypatch) -> None:
    """Half of it makes every estimator look twice too large."""
    monkeypatch.setattr(checkpoints, "_kl", lambda *arguments: kljax.kl_from_hidden(*arguments) / 2)
    audit = audit_of(saved, apply=hidden, head=lambda params: params["head"])
    k1 = audit.find(kind="value", level="token", estimator="k1").metrics
    np.testing.assert_allclose(k1["relative_bias"].value, 1, rtol=1e-9)


def test_few_positions_have_logits_at_once(saved, monkeypatch) -> None:
    shapes, plain = set(), checkpoints._logits
    monkeypatch.setattr(checkpoints, "_logits", lambda *x: shapes.add(plain(*x).shape) or plain(*x))
    audit = audit_of(saved, apply=hidden, head=lambda params: params["head"], chunk_size=7)
    # Two rows have 60 positions, the last row 30: as many whole chunks as there are in those, and in 64.
    assert shapes == {(56, VOCABULARY), (28, VOCABULARY)}
    assert audit.settings["positions"] == MASK.sum()


def test_mismatched_head_is_reported(saved) -> None:
    for head, message in (
        (
            lambda params: params["head"].T,
            r"apply: got shape \[2, 30, 6\] .* \[rows, T, D\] with the D of its head",
        ),
        (lambda params: params["head"][0], r"head: got shape \[4\], expected two axes"),
    ):
        with pytest.raises(ValueError, match=message):
            audit_of(saved, apply=hidden, head=head)
    with pytest.raises(ValueError, match="head_layout"):
        audit_of(saved, apply=hidden, head=lambda params: params["head"], head_layout="v")
