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
    heads,
    hidden_and_gradient,
    poisoned,
)
from train.models import Decoder, attention, kernels
from train.models.attention import AttentionOptions, attend
from train.models.packing import PackedRows, packed_mask

LENGTHS = np.asarray(MASK)[:, PROMPT:].sum(1)
SLOTS = 20


def places(shared: bool) -> PackedRows:
    """One completion after another, with its prompt where the packed row has none yet; rows of `SLOTS`."""
    mask = np.asarray(MASK)
    tokens, prompts, starts = [[]], np.arange(len(mask)), np.zeros((len(mask), 2), int)
    home: dict[int, tuple[int, int, int]] = {}
    for row, length in enumerate(LENGTHS):
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
    return PackedRows(*(jnp.asarray(x, jnp.int32) for x in (filled, prompts, starts)), shared=shared)


@pytest.mark.parametrize("shared", [True, False])
def test_packed_hidden_states_and_gradients_equal_full_rows(shared):
    """Windows shorter than a prompt, two ropes, caps, an empty completion, and a prompt in two packed rows."""
    model, packed = Decoder(CONFIG), places(shared)
    assert len(packed.tokens) < PROMPTS * GROUP
    predicts = np.roll(np.asarray(MASK), -1, axis=1)
    predicts[:, : PROMPT - 1] = predicts[:, -1] = False
    weight = np.where(predicts[..., None], WEIGHT, 0)

    def run(params, packed):
        hidden = model.bind(params).packed(TOKENS, MASK, packed, prompt=PROMPT)
        return (hidden * weight).sum(), hidden

    full, whole_gradient = jax.device_get(hidden_and_gradient(poisoned(), weight))
    gradient, hidden = jax.device_get(jit(jax.grad(run, has_aux=True))(poisoned(), packed))
    np.testing.assert_allclose(hidden[predicts], full[predicts], rtol=0, atol=5e-6)
    assert not hidden[~predicts].any()
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(whole_gradient))
    chex.assert_trees_all_close(gradient, whole_gradient, rtol=0, atol=5e-6 * scale)


def test_splash_attention_takes_packed_rows_without_shared_prompts(monkeypatch):
    """Segments cannot say that two completions attend to one prompt and not to each other."""
    called = []

    def splash(query, *others, **options):
        called.append(query.shape)
        return query

    monkeypatch.setattr(attention, "splash_attention", splash)
    monkeypatch.setattr(kernels, "device_kind", lambda: "TPU v5 lite")
    for shared in (True, False):
        packed = places(shared)
        query, key, value = heads(*packed.tokens.shape)
        output = attend(query, key, value, packed_mask(MASK, packed, PROMPT, None), AttentionOptions())
        assert output.shape == query.shape
        assert len(called) == (not shared)
