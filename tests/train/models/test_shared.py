"""A prompt that goes through the layers once gives its completions what each row alone gives them."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.models.test_padding import CONFIG, PAD, jit, weights
from train.models import Decoder, attention, kernels
from train.models.attention import AttentionOptions, attend, causal_mask
from train.models.kernels import choose_kernel, splash_attention
from train.models.packing import attend_shared, pack, shared_prompt_mask, unpack
from train.models.sharding import make_mesh

PROMPTS, GROUP, PROMPT, NEW_TOKENS = 2, 3, 7, 5
HEADS, KV_HEADS, WIDTH, WINDOW = 4, 2, 16, 3


def batch(seed=0):
    """Prompts padded on the left, completions of 0 to all columns, and tokens [B, P + C] of which 0 is the padding."""
    rng = np.random.default_rng(seed)
    column, lengths = np.arange(PROMPT + NEW_TOKENS), np.array([5, 0, 3, 1, 5, 2])[:, None]
    begins = np.array([2, 0]).repeat(GROUP)[:, None]
    mask = (column >= begins) & (column < PROMPT + lengths)
    tokens = rng.integers(1, CONFIG.vocab_size, mask.shape)
    tokens[:, :PROMPT] = tokens[::GROUP, :PROMPT].repeat(GROUP, axis=0)
    return jnp.asarray(np.where(mask, tokens, PAD), jnp.int32), jnp.asarray(mask)


TOKENS, MASK = batch()


def poisoned():
    """Weights whose padding is NaN: it may reach no real token, and no gradient."""
    params = weights()
    table = params["embed_tokens"]["embedding"].at[PAD].set(jnp.nan)
    return params | {"embed_tokens": {"embedding": table}}


def heads(rows, length, counts=(HEADS, KV_HEADS, KV_HEADS)):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (rows, length, count, WIDTH)) for key, count in zip(keys, counts, strict=True)]


def test_packing_keeps_one_prompt_and_every_completion():
    packed = pack(TOKENS, PROMPT, GROUP)
    assert packed.shape == (PROMPTS, PROMPT + GROUP * NEW_TOKENS)
    np.testing.assert_array_equal(packed[1, :PROMPT], TOKENS[GROUP, :PROMPT])
    np.testing.assert_array_equal(packed[1, PROMPT + NEW_TOKENS : PROMPT + 2 * NEW_TOKENS], TOKENS[GROUP + 1, PROMPT:])
    np.testing.assert_array_equal(unpack(packed, PROMPT, GROUP), TOKENS)


WEIGHT = np.random.default_rng(2).standard_normal((*TOKENS.shape, CONFIG.width)).astype(np.float32)


@functools.partial(jit, static_argnames=("prompt", "group"))
def hidden_and_gradient(params, weight, **options):
    """Hidden states, and the gradient of their weighted sum over real tokens; of whole rows, without options."""

    def run(params):
        transformer = Decoder(CONFIG).bind(params)
        hidden = transformer.grouped(TOKENS, MASK, **options) if options else transformer(TOKENS, MASK)
        return jnp.where(MASK[..., None], hidden * weight, 0).sum(), hidden

    gradient, hidden = jax.grad(run, has_aux=True)(params)
    return hidden, gradient


def test_shared_hidden_states_and_gradients_equal_full_rows():
    full, whole_gradient = jax.device_get(hidden_and_gradient(poisoned(), WEIGHT))
    shared, gradient = jax.device_get(hidden_and_gradient(poisoned(), WEIGHT, prompt=PROMPT, group=GROUP))
    real = np.asarray(MASK)
    chex.assert_trees_all_close(shared[real], full[real], atol=5e-6)
    chex.assert_tree_all_finite((shared, gradient))
    relative = jax.tree.map(lambda a, b: np.abs(a - b).max() / (np.abs(b).max() + 1e-30), gradient, whole_gradient)
    assert max(jax.tree.leaves(relative)) < 5e-6


def test_completion_attends_to_itself_and_its_prompt():
    model, params = Decoder(CONFIG), poisoned()
    run = jit(lambda tokens: model.bind(params).grouped(tokens, MASK, prompt=PROMPT, group=GROUP))
    before, at = run(TOKENS), (0, PROMPT + 2)
    after = run(TOKENS.at[at].set(1 + TOKENS[at] % 23))
    changed = np.abs(np.asarray(after - before)).max(-1) > 0
    assert changed[at]
    assert not changed[1:].any()
    assert not changed[0, : PROMPT + 2].any()


@pytest.mark.parametrize(("sliding", "softcap"), [(False, None), (True, 2.0)])
def test_splash_attention_of_last_columns_has_equal_gradient(sliding, softcap, monkeypatch):
    """Interpreted: what the kernel computes, not how fast. Lengths that pad queries and keys by different amounts.

    Gradients with everything, the plain one forward.
    """

    def interpreted(*args, **options):
        return splash_attention(*args, **options, interpret=True)

    rows, prompt, max_new_tokens = 2, 110, 20
    column = jnp.arange(prompt + 2 * max_new_tokens)
    mask = jnp.stack([column[: prompt + max_new_tokens] >= 7, column[: prompt + max_new_tokens] < 124])
    both = jnp.concatenate([mask, mask.at[1, prompt:].set(False)])[jnp.array([0, 2, 1, 3])]
    both = both.at[:, :prompt].set(both[::2, :prompt].repeat(2, axis=0))
    mask = shared_prompt_mask(both, prompt, 2, WINDOW)

    def computed():
        run = functools.partial(attend_shared, mask=mask, options=AttentionOptions(sliding, 0.7, softcap))

        def results():
            operands = heads(rows, prompt + 2 * max_new_tokens, (2, 1, 1))
            if not sliding:
                return (run(*operands),)
            output, pull = jax.vjp(run, *operands)
            return output, *pull(jax.random.normal(jax.random.key(1), output.shape))

        return jax.jit(lambda: results()).lower().compile({"xla_backend_optimization_level": 0})()  # noqa: PLW0108

    expected = computed()
    monkeypatch.setattr(attention, "splash_attention", interpreted)
    monkeypatch.setattr(kernels, "device_kind", lambda: "TPU v5 lite")
    chex.assert_trees_all_close(computed(), expected, atol=1e-5)


def test_every_query_attends_as_in_a_full_row():
    full, last = (causal_mask(MASK, WINDOW, first=first) for first in (0, PROMPT))
    assert last.sliding is not None
    np.testing.assert_array_equal(last.full, full.full[:, :, PROMPT:])
    np.testing.assert_array_equal(last.sliding, full.sliding[:, :, PROMPT:])


def test_cudnn_takes_no_odd_number_of_keys(monkeypatch):
    monkeypatch.setattr(kernels, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    query, key = (jnp.zeros((2, length, 4, 64), jnp.bfloat16) for length in (6, 11))
    assert choose_kernel(query, key, None) is None
    assert choose_kernel(query, key[:, 1:], None) == "cudnn"


@pytest.mark.parametrize(("kind", "platform", "call"), [("TPU v5 lite", "tpu", "@tpu_custom_call")])
def test_both_parts_can_be_lowered_on_a_mesh(kind, platform, call, monkeypatch):
    monkeypatch.setattr(kernels, "device_kind", lambda: kind)
    mask = shared_prompt_mask(jnp.ones((4, 40), bool), 24, 2, None)

    def loss(*operands):
        return attend_shared(*operands, mask, AttentionOptions(scale=1.0)).astype(jnp.float32).sum()

    operands = [x.astype(jnp.bfloat16) for x in heads(2, 24 + 2 * 16)]
    with jax.set_mesh(make_mesh(2, 1, 2)):
        text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*operands).lower(lowering_platforms=(platform,)).as_text()
    # Forward, and dq, dkv in the backward pass, of prompts and of completions.
    assert len(re.findall(call, text)) == 6


@pytest.mark.thorough
def test_attention_without_a_shared_prompt_is_untouched():
    """The sum over groups of the gradient of a prompt's keys is what separate rows add up to."""
    full = causal_mask(MASK, None)
    query, key, value = heads(PROMPTS, PROMPT + GROUP * NEW_TOKENS)

    def separate(key, value):
        rows = (unpack(x, PROMPT, GROUP) for x in (query, key, value))
        return jnp.where(MASK[..., None, None], attend(*rows, full), 0)[:, PROMPT:].sum()

    def shared(key, value):
        mask = shared_prompt_mask(MASK, PROMPT, GROUP, None)
        output = attend_shared(query, key, value, mask, AttentionOptions())
        return jnp.where(MASK[..., None, None], unpack(output, PROMPT, GROUP), 0)[:, PROMPT:].sum()

    actual, expected = (jax.value_and_grad(f, (0, 1))(key, value) for f in (shared, separate))
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-5)
