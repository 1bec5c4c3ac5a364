"""Packed rows give completions the hidden states and gradients of rows of their own; padding may be NaN."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.models.test_padding import CONFIG, jit
from tests.train.models.test_shared import (
    GROUP,
    MASK,
    NEW_TOKENS,
    PROMPT,
    PROMPTS,
    TOKENS,
    WEIGHT,
    blocks_of,
    hidden_and_gradient,
    keys_of_rows,
    poisoned,
)
from train.models import Decoder
from train.models.attention.spans import dense_mask
from train.models.packing import PackedRows, packed_spans

SLOTS = 20


def places(shared: bool, mask: np.ndarray) -> PackedRows:
    """One completion after another, with its prompt where the packed row has none yet; rows of `SLOTS`."""
    # As the trainer measures them: a prompt from its first token on, a completion up to its last.
    begun, follows = np.logical_or.accumulate(mask, axis=1), np.logical_or.accumulate(mask[:, ::-1], axis=1)[:, ::-1]
    mask = np.where(np.arange(mask.shape[1]) < PROMPT, begun, follows)
    tokens, prompts, starts = [[]], np.arange(len(mask)), np.zeros((len(mask), 2), int)
    home: dict[int, tuple[int, int, int]] = {}
    for row, length in enumerate(mask[:, PROMPT:].sum(1)):
        group = row // GROUP if shared else row
        at, source, last = home.get(group, (-1, row, 0))
        columns = [row * (PROMPT + NEW_TOKENS) + column for column in np.flatnonzero(mask[row])]
        prompt, completion = columns[: len(columns) - length], columns[len(columns) - length :]
        if at != len(tokens) - 1 or len(tokens[-1]) + length > SLOTS:
            source = row
            if len(tokens[-1]) + len(columns) > SLOTS:
                tokens.append([])
            tokens[-1] += prompt
            last = len(tokens[-1]) - 1
            home[group] = len(tokens) - 1, row, last
        prompts[row] = source
        starts[row] = np.array([last, len(tokens[-1])]) + (len(tokens) - 1) * SLOTS
        tokens[-1] += completion
    filled = np.full((len(tokens), SLOTS), -1)
    for at, slots in enumerate(tokens):
        filled[at, : len(slots)] = slots
    return PackedRows(*(jnp.asarray(x, jnp.int32) for x in (filled, prompts, starts)))


@pytest.mark.parametrize(("shared", "block"), [(True, None), (False, None), (True, 4)])
def test_packed_hidden_states_and_gradients_equal_full_rows(shared, block, monkeypatch):
    """Windows shorter than a prompt, two ropes, caps, an empty completion, and a prompt in two packed rows."""
    model, packed = Decoder(CONFIG), places(shared, np.asarray(MASK))
    assert len(packed.tokens) < PROMPTS * GROUP
    predicts = np.roll(np.asarray(MASK), -1, axis=1)
    predicts[:, : PROMPT - 1] = predicts[:, -1] = False
    weight = np.where(predicts[..., None], WEIGHT, 0)

    def run(params, packed):
        hidden = model.bind(params).packed(TOKENS, MASK, packed, prompt=PROMPT)
        return (hidden * weight).sum(), hidden

    full, whole_gradient = jax.device_get(hidden_and_gradient(poisoned(), weight))
    if block is not None:
        blocks_of(block, monkeypatch)
    gradient, hidden = jax.device_get(jit(jax.grad(run, has_aux=True))(poisoned(), packed))
    np.testing.assert_allclose(hidden[predicts], full[predicts], rtol=0, atol=5e-6)
    assert not hidden[~predicts].any()
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(whole_gradient))
    chex.assert_trees_all_close(gradient, whole_gradient, rtol=0, atol=5e-6 * scale)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("holes", [True, False])
def test_every_slot_attends_as_in_its_row(shared, window, holes):
    mask = np.asarray(MASK)
    if holes:
        drawn = np.random.default_rng(1).random(mask.shape) < 0.8
        drawn[:, :PROMPT] = drawn[::GROUP, :PROMPT].repeat(GROUP, axis=0)
        mask = mask & drawn
    packed = places(shared, mask)
    row, column = np.divmod(np.asarray(packed.tokens), PROMPT + NEW_TOKENS)
    first, keys = np.asarray(packed.prompts)[row], keys_of_rows(mask, window)
    same = (row[:, :, None] == row[:, None]) | ((first[:, :, None] == first[:, None]) & (column < PROMPT)[:, None])
    expected = same & keys[row[:, :, None], column[:, :, None], column[:, None]]
    real = (np.asarray(packed.tokens) >= 0) & mask[row, column]
    expected = np.where(real[:, :, None] & real[:, None], expected, np.eye(SLOTS, dtype=bool))
    spans = packed_spans(jnp.asarray(mask), packed, PROMPT, window)
    np.testing.assert_array_equal(dense_mask(spans.end, spans.for_layer(window is not None)), expected)
