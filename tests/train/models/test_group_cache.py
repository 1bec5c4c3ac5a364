"""The cache of rows that share prompts, against one that holds every row's prompt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.models import KeyValues
from train.models.attention import AttentionOptions
from train.models.cache import CacheMask

PROMPTS, GROUP, WIDTH, NEW_TOKENS, KV_HEADS, HEADS, SIZE = 2, 3, 5, 4, 2, 4, 8
ROWS = PROMPTS * GROUP


def softmax_of_seen(query, key, value, seen, *, softcap, sinks):
    """[B, N, H] in float64, one row and head at a time over what is seen alone."""
    actual = np.zeros(query.shape)
    for row, head in np.ndindex(*query.shape[:2]):
        columns = np.flatnonzero(seen[row])
        shared = head // (HEADS // KV_HEADS)
        if len(columns):
            scores = key[row, columns, shared].astype(np.float64) @ query[row, head] * SIZE**-0.5
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores)
            total = weights.sum() + (0 if sinks is None else np.exp(np.float64(sinks[head])))
            actual[row, head] = weights / total @ value[row, columns, shared]
    return actual


@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (3.0, None), (None, (-2.0, 9.0, 0.0, 30.0))])
@pytest.mark.parametrize("filled", [1, 3])
def test_group_cache_attention_equals_attention_per_row(softcap, sinks, filled):
    rng = np.random.default_rng(0)
    prompt = rng.normal(size=(2, PROMPTS, WIDTH, KV_HEADS, SIZE)).astype(np.float32)
    completions = rng.normal(size=(2, ROWS, filled, KV_HEADS, SIZE)).astype(np.float32)
    query = 4 * rng.normal(size=(ROWS, HEADS, SIZE)).astype(np.float32)
    # Prompts of two lengths; a row whose completion is longer than that of others, and one that sees nothing.
    seen = np.zeros((ROWS, WIDTH + NEW_TOKENS), bool)
    seen[:GROUP, 2:WIDTH] = seen[GROUP:, :WIDTH] = True
    seen[:, WIDTH : WIDTH + filled] = True
    seen[1, WIDTH] = False
    seen[4] = False
    cache = KeyValues(*prompt).for_rows(GROUP, NEW_TOKENS)
    for column in range(filled):
        cache = cache.write(KeyValues(*completions[:, :, column : column + 1]), jnp.int32(WIDTH + column))
    stored = None if sinks is None else jnp.array(sinks)
    mask, options = CacheMask(jnp.asarray(seen)), AttentionOptions(softcap=softcap, sinks=stored)
    actual = jax.jit(lambda c, q: c.attend(q, mask, options))(cache, query[:, None])
    key, value = np.concatenate([np.repeat(prompt, GROUP, axis=1), completions], axis=2)
    expected = softmax_of_seen(query, key, value, seen[:, : WIDTH + filled], softcap=softcap, sinks=sinks)
    np.testing.assert_allclose(actual[:, 0], expected, atol=2e-6)
    assert not np.any(actual[4])
