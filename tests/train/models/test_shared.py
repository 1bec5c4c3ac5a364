"""A prompt that goes through the layers once gives its completions what each row alone gives them."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.train.models.test_padding import CONFIG, PAD, jit, weights
from train.models import Decoder, attention
from train.models.attention import AttentionOptions, attend, choose_implementation
from train.models.attention.blocks import attend_in_blocks
from train.models.attention.spans import Spans, dense_mask, row_spans
from train.rl.policy import ScoredPolicy, Sequences, hidden_states
from train.sequences.forest import group_forest

PROMPTS, GROUP, PROMPT, NEW_TOKENS = 2, 3, 7, 5
HEADS, KV_HEADS, WIDTH, WINDOW = 4, 2, 16, 3


def batch(seed=0):
    """Tokens [B, P + C] of which 0 is the padding, their mask and prompt lengths; completions of 0 to C tokens."""
    rng = np.random.default_rng(seed)
    column, lengths = np.arange(PROMPT + NEW_TOKENS), np.array([5, 0, 3, 1, 5, 2])
    prompts = np.array([5, 7]).repeat(GROUP)
    mask = column < (prompts + lengths)[:, None]
    tokens = rng.integers(1, CONFIG.vocab_size, mask.shape)
    tokens = np.where(column < prompts[:, None], tokens[::GROUP].repeat(GROUP, axis=0), tokens)
    return jnp.asarray(np.where(mask, tokens, PAD), jnp.int32), jnp.asarray(mask), jnp.asarray(prompts)


TOKENS, MASK, PROMPT_LENGTHS = batch()


def poisoned():
    """Weights whose padding is NaN: it may reach no real token, and no gradient."""
    params = weights()
    table = params["embed_tokens"]["embedding"].at[PAD].set(jnp.nan)
    return params | {"embed_tokens": {"embedding": table}}


def heads(rows, length, counts=(HEADS, KV_HEADS, KV_HEADS)):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (rows, length, count, WIDTH)) for key, count in zip(keys, counts, strict=True)]


def keys_of_rows(mask, window):
    """The keys [B, T, T] of rows by their definition: the last `window` real tokens; of padding itself."""
    keys = np.zeros((*mask.shape, mask.shape[1]), bool)
    for row, at in np.ndindex(*mask.shape):
        seen = np.flatnonzero(mask[row, : at + 1]) if mask[row, at] else np.array([at])
        keys[row, at, seen if window is None else seen[-window:]] = True
    return keys


def blocks_of(size, monkeypatch):
    """Has rows of more than `size` slots go through blocks of `size` slots."""
    monkeypatch.setattr(attention, "DENSE_WIDTH", size)
    monkeypatch.setitem(attention._BY_BLOCKS, "blocks", (functools.partial(attend_in_blocks, block=size), size))


def in_groups(transformer, tokens):
    """Hidden states [B, T, D] of sequences whose prompts go through the layers once."""
    forest = group_forest(MASK, PROMPT_LENGTHS, (PROMPT, NEW_TOKENS), GROUP)
    spans = forest.spans(CONFIG.sliding_window)
    return forest.gather(transformer.run(forest.take(tokens), forest.take(MASK), forest.depth, spans)[0])


WEIGHT = np.random.default_rng(2).standard_normal((*TOKENS.shape, CONFIG.width)).astype(np.float32)


@functools.partial(jit, static_argnames="shared")
def hidden_and_gradient(params, weight, shared=False):
    """Hidden states, and the gradient of their weighted sum over real tokens; of whole rows, or with shared prompts."""

    def run(params):
        transformer = Decoder(CONFIG).bind(params)
        hidden = in_groups(transformer, TOKENS) if shared else transformer(TOKENS, MASK)
        return jnp.where(MASK[..., None], hidden * weight, 0).sum(), hidden

    gradient, hidden = jax.grad(run, has_aux=True)(params)
    return hidden, gradient


def test_shared_hidden_states_and_gradients_equal_full_rows():
    """The gradient of the states of completions; those of a prompt are not gathered for a gradient."""
    weight = np.where((np.arange(TOKENS.shape[1]) >= PROMPT_LENGTHS[:, None])[..., None], WEIGHT, 0)
    full, whole_gradient = jax.device_get(hidden_and_gradient(poisoned(), weight))
    shared, gradient = jax.device_get(hidden_and_gradient(poisoned(), weight, shared=True))
    real = np.asarray(MASK)
    chex.assert_trees_all_close(shared[real], full[real], atol=5e-6)
    chex.assert_tree_all_finite((shared, gradient))
    relative = jax.tree.map(lambda a, b: np.abs(a - b).max() / (np.abs(b).max() + 1e-30), gradient, whole_gradient)
    assert max(jax.tree.leaves(relative)) < 5e-6


def test_rows_of_a_gpu_go_by_their_lengths(monkeypatch):
    """By lengths alone, with the window of a kernel, rows are what their masks say."""
    config, params = dataclasses.replace(CONFIG, attention_softcap=None), poisoned()
    mask = MASK
    sequences = Sequences.rows(TOKENS, mask)

    def run(params):
        hidden = hidden_states(ScoredPolicy(Decoder(config), kljax.Policy(params)), sequences)
        return jnp.where(mask[..., None], hidden * WEIGHT, 0).sum(), hidden

    def computed(params):
        return jax.jit(jax.grad(run, has_aux=True))(params)

    gradient, full = computed(params)
    of_jax, windows = jax.nn.dot_product_attention, set()

    def by_lengths(*operands, implementation, local_window_size, **options):
        assert implementation == "cudnn"
        windows.add(local_window_size)
        return of_jax(*operands, implementation="xla", local_window_size=local_window_size, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_lengths)
    monkeypatch.setattr(attention, "choose_implementation", lambda *_: "cudnn")
    jax.clear_caches()
    of_lengths, states = computed(params)
    assert windows == {None, (CONFIG.sliding_window - 1, 0)}
    chex.assert_tree_all_finite((states, of_lengths))
    chex.assert_trees_all_close(states[mask], full[mask], atol=5e-6)
    relative = jax.tree.map(lambda a, b: np.abs(a - b).max() / (np.abs(b).max() + 1e-30), of_lengths, gradient)
    assert max(jax.tree.leaves(relative)) < 5e-6


def test_completion_attends_to_itself_and_its_prompt():
    model, params = Decoder(CONFIG), poisoned()
    run = jit(lambda tokens: in_groups(model.bind(params), tokens))
    before, at = run(TOKENS), (0, int(PROMPT_LENGTHS[0]) + 2)
    after = run(TOKENS.at[at].set(1 + TOKENS[at] % 23))
    changed = np.abs(np.asarray(after - before)).max(-1) > 0
    assert changed[at]
    assert not changed[1:].any()
    assert not changed[at[0], : at[1]].any()


def real_results(operands, spans, options, real):
    """The outputs of real slots, and the gradients of their weighted sum."""
    weight = np.random.default_rng(3).normal(size=(*real.shape, 1, 1))

    @jax.jit
    def run(*operands):
        output, pull = jax.vjp(lambda *operands: attend(*operands, spans, options), *operands)
        there = real[..., None, None]
        return jnp.where(there, output, 0), *pull(jnp.where(there, weight, 0).astype(output.dtype) + 0 * output)

    return run(*operands)


@pytest.mark.parametrize(("sliding", "softcap"), [(False, None), (True, 2.0)])
@pytest.mark.parametrize("kernel", ["tpu", "triton"])
def test_kernels_of_groups_have_equal_gradients(kernel, sliding, softcap, monkeypatch):
    """Interpreted: what a kernel computes, not how fast. Rows whose width is no multiple of its block."""
    prompt, length = 110, 20
    column = np.arange(prompt + 2 * length)
    prompts, completions = np.array([103, 103, 110, 110]), np.array([20, 15, 14, 20])
    mask = column[: prompt + length] < (prompts + completions)[:, None]
    forest = group_forest(jnp.asarray(mask), jnp.asarray(prompts), (prompt, length), 2)
    real = np.asarray(forest.readers[..., 0] >= 0)
    spans, options = forest.spans(WINDOW), AttentionOptions(sliding, 0.7, softcap)
    operands = heads(2, len(column), (2, 1, 1))
    expected = real_results(operands, spans, dataclasses.replace(options, kernels=False), real)
    function, block = attention._BY_BLOCKS[kernel]
    monkeypatch.setitem(attention._BY_BLOCKS, kernel, (functools.partial(function, interpret=True), block))
    monkeypatch.setattr(attention, "choose_implementation", lambda *_: kernel)
    chex.assert_trees_all_close(real_results(operands, spans, options, real), expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_rectangles_of_groups_have_equal_gradients(window, monkeypatch):
    """The two calls of cuDNN, computed by XLA."""
    forest = group_forest(MASK, PROMPT_LENGTHS, (PROMPT, NEW_TOKENS), GROUP)
    real = np.asarray(forest.readers[..., 0] >= 0)
    spans, options = forest.spans(window), AttentionOptions(window is not None)
    operands = heads(*real.shape)
    expected = real_results(operands, spans, options, real)
    products = jax.nn.dot_product_attention

    def by_xla(*operands, implementation, **options):
        assert implementation == "cudnn"
        return products(*operands, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    monkeypatch.setattr(attention, "choose_implementation", lambda *_: "cudnn")
    chex.assert_trees_all_close(real_results(operands, spans, options, real), expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, WINDOW, 9])
def test_every_query_attends_within_its_row(window):
    """With padding anywhere."""
    anywhere = np.random.default_rng(4).random((5, PROMPT + NEW_TOKENS)) < 0.6
    for mask in (np.asarray(MASK), anywhere):
        spans = row_spans(jnp.asarray(mask), window)
        keys = dense_mask(spans.end, spans.for_layer(window is not None))
        np.testing.assert_array_equal(keys, keys_of_rows(mask, window))


def test_cudnn_takes_no_odd_number_of_keys(monkeypatch):
    monkeypatch.setattr(attention, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    ones = jnp.ones((2, 40), jnp.int32)
    query, key = (jnp.zeros((2, 40, count, 64), jnp.bfloat16) for count in (4, 2))
    for group, expected in (((24, 8), "cudnn"), ((25, 5), "triton"), ((24, 16), "cudnn"), ((35, 5), "triton")):
        assert choose_implementation(query, key, Spans(ones, ones, group=group)) == expected
    rows = Spans(ones, ones, lengths=ones[:, 0])
    assert choose_implementation(query, key, rows) == "cudnn"
    assert choose_implementation(query[:, 1:], key[:, 1:], rows) == "triton"
