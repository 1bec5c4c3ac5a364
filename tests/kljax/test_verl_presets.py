"""verl's presets of rollout_correction against their settings, written out as weights and masks."""

import numpy as np
import pytest

import kljax
from kljax.systems._data.verl.presets import PRESETS
from tests.masks import MASK, draw

LP, NOISE, ADV = draw(0.7, 0.002, 1.0)
LP = LP - 1.5
# Rows close to the sampler, and a few far from it: both sides of every threshold.
SCALE = np.where(np.arange(len(MASK)) % 2 == 0, 500.0, 0.2)[:, None]
ROLLOUT = LP - NOISE * SCALE
D = np.where(MASK, LP - ROLLOUT, 0)
N = np.maximum(MASK.sum(-1, keepdims=True), 1)
TOKEN, SEQUENCE = np.minimum(np.exp(D), 2), np.minimum(np.exp(D.sum(-1, keepdims=True)), 2)
ICEPOP = np.where((np.exp(D) >= 0.5) & (np.exp(D) <= 5), np.exp(D), 0)
INSIDE = np.abs(D.sum(-1, keepdims=True)) <= np.log(2)
MEAN = -D.mean(-1, keepdims=True) * MASK.shape[-1] / N
GEOMETRIC = (np.log(0.999) <= MEAN) & (np.log(1.001) >= MEAN)
K3 = np.where(MASK, np.exp(D) - 1 - D, 0).sum(-1, keepdims=True) / N <= 0.01
# rollout_is, and the rows that rollout_rs keeps.
WEIGHTS = {
    "token_is": (TOKEN, True),
    "seq_is": (SEQUENCE, True),
    "token_icepop": (ICEPOP, True),
    "seq_is_rs": (SEQUENCE, INSIDE),
    "geo_rs": (1.0, GEOMETRIC),
    "geo_rs_seq_tis": (SEQUENCE, GEOMETRIC),
    "geo_rs_token_tis": (TOKEN, GEOMETRIC),
    "k3_rs": (1.0, K3),
    "k3_rs_seq_tis": (SEQUENCE, K3),
    "k3_rs_token_tis": (TOKEN, K3),
    "ppo_clip": (1.0, True),
    "ppo_clip_geo_rs": (1.0, GEOMETRIC),
    "ppo_clip_k3_rs": (1.0, K3),
    "pg_is": (SEQUENCE, True),
    "pg_token_icepop": (ICEPOP, True),
    "pg_geo_rs": (1.0, GEOMETRIC),
    "pg_geo_rs_seq_tis": (SEQUENCE, GEOMETRIC),
    "pg_geo_rs_token_tis": (TOKEN, GEOMETRIC),
}


def test_presets_are_the_eighteen_of_verl() -> None:
    assert len(PRESETS) == 18
    assert [entry.name.partition("_")[2] for entry in PRESETS] == list(WEIGHTS)
    for rows in (GEOMETRIC, K3, INSIDE):
        assert 0 < rows.sum() < rows.size


@pytest.mark.parametrize("name", [entry.name for entry in PRESETS])
def test_preset_has_its_weights_and_rows(name: str) -> None:
    mode, _, rest = name.partition("_")
    weights, rows = WEIGHTS[rest]
    expected = np.where(MASK & rows, weights, 0)
    call = kljax.systems.get(f"verl/{name}")
    arrays = {"log_probs": LP, "mask": MASK}
    if mode == "decoupled":
        np.testing.assert_allclose(call({**arrays, "sampling_log_probs": ROLLOUT}), expected, 1e-9)
        return
    if rest.startswith("ppo"):
        clipped = np.clip(np.exp(D), 0.8, 1.2)
        loss = np.maximum(-ADV * np.exp(D), -ADV * clipped)
        loss = np.where(ADV < 0, np.minimum(loss, -3 * ADV), loss)
    else:
        loss = -ADV * LP
    actual = call({**arrays, "rollout_log_probs": ROLLOUT, "advantages": ADV})
    np.testing.assert_allclose(actual, expected * np.where(MASK, loss, 0), 1e-9, 1e-12)
