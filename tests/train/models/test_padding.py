"""Left padding, right padding and packing are one computation; what computing in another type changes."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from train.models import Decoder, DecoderConfig, LayerKind, Rope
from train.models.parameters import abstract_params
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, token_stats

# Everything that a row's layout could disturb: windows shorter than the text, two ropes, caps, both kinds of layers.
CONFIG = DecoderConfig(
    vocab_size=24,
    layers=3,
    width=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=24,
    rope=Rope(1000.0),
    local_rope=Rope(100.0),
    sliding_window=3,
    pattern=(LayerKind("sliding"), LayerKind("full")),
    activation="gelu_tanh",
    norm_offset=True,
    post_norms=True,
    qk_norm=True,
    qkv_bias=True,
    embed_scale=4.0,
    attention_softcap=5.0,
    final_softcap=3.0,
)
PAD = 0
LENGTH, WIDTH = 6, 14
# Most of the time goes into the compiler.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def weights():
    """Weights where attention is far from uniform and norms and biases are not at their start."""
    shapes = abstract_params(Decoder(CONFIG), make_mesh())
    random = np.random.default_rng(0)

    def draw(x):
        size = 0.3 if x.ndim < 3 else x.shape[-2] ** -0.5 + 0.2
        return jnp.asarray(size * random.standard_normal(x.shape, np.float32))

    return jax.tree.map(draw, shapes)


@pytest.fixture(scope="module")
def params():
    return weights()


TEXTS = np.random.default_rng(1).integers(1, 24, (2, LENGTH))


def row(columns):
    """Both sequences placed at columns of one row each: tokens, mask."""
    tokens, mask = np.full((2, WIDTH), PAD, np.int32), np.zeros((2, WIDTH), bool)
    for i, at in enumerate(columns):
        tokens[i, at], mask[i, at] = TEXTS[i], True
    return jnp.asarray(tokens), jnp.asarray(mask)


LAYOUTS = {
    "left": [np.arange(WIDTH - LENGTH, WIDTH)] * 2,
    "right": [np.arange(LENGTH)] * 2,
    "holes": [np.array([1, 2, 5, 6, 12, 13]), np.array([0, 2, 3, 7, 8, 10])],
}


@pytest.fixture(scope="module")
def run():
    return jit(lambda params, *args: Decoder(CONFIG).bind(params)(*args))


@pytest.fixture(scope="module")
def alone(params, run):
    """Each sequence without padding."""
    return run(params, jnp.asarray(TEXTS, jnp.int32), jnp.ones(TEXTS.shape, bool))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_anywhere_changes_nothing(layout, params, run, alone):
    tokens, mask = row(LAYOUTS[layout])
    # The embedding of the padding is NaN: it may reach no real token, and no gradient.
    poisoned = jax.tree.map(lambda x: x, params)
    poisoned["embed_tokens"] = {"embedding": params["embed_tokens"]["embedding"].at[PAD].set(jnp.nan)}
    hidden = run(poisoned, tokens, mask)
    for i, at in enumerate(LAYOUTS[layout]):
        chex.assert_trees_all_close(hidden[i, at], alone[i], atol=3e-6)
    assert jnp.isfinite(hidden).all()


def test_positions_count_by_their_differences(params, run, alone):
    at = np.arange(1, 7)
    tokens = jnp.zeros((1, WIDTH), jnp.int32).at[0, at].set(TEXTS[0])
    mask = jnp.zeros((1, WIDTH), bool).at[0, at].set(True)
    positions = jnp.zeros((1, WIDTH), jnp.int32).at[0, at].set(range(6))
    hidden = run(params, tokens, mask, positions)
    chex.assert_trees_all_close(hidden[0, at], alone[0], atol=3e-6)
    stretched = run(params, tokens, mask, 2 * positions)
    assert jnp.abs(stretched - hidden)[0, 2:6].max() > 1e-2
    moved = run(params, tokens, mask, positions + 17)
    chex.assert_trees_all_close(moved[0, at], hidden[0, at], atol=2e-5)


def test_log_probs_and_gradients_are_independent_of_padding(params, alone):
    model = Decoder(CONFIG)

    @jit
    def scored(params, tokens, mask):
        # The first token of a sequence has nothing before it that would predict it.
        predicted = mask & (jnp.cumsum(mask, axis=1) > 1)

        def total(params):
            stats, _ = token_stats(
                ScoredPolicy(model, kljax.Policy(params)), Sequences.rows(tokens, mask, predicted), temperature=0.8
            )
            return stats.log_prob.sum(), stats.log_prob

        return jax.value_and_grad(total, has_aux=True)(params)

    texts = jnp.asarray(TEXTS, jnp.int32)
    (whole, whole_scores), whole_grads = scored(params, texts, jnp.ones(texts.shape, bool))
    (right, right_scores), right_grads = scored(params, *row(LAYOUTS["right"]))
    chex.assert_trees_all_close(whole_scores[:, 1:], right_scores[:, 1:LENGTH], atol=3e-6)
    assert not right_scores[:, LENGTH:].any()
    chex.assert_trees_all_close(whole, right, rtol=1e-6)
    scale = jax.tree.map(lambda x: jnp.abs(x).max(), whole_grads)
    relative = jax.tree.map(lambda a, b, s: jnp.abs(a - b).max() / s, whole_grads, right_grads, scale)
    assert max(jax.tree.leaves(relative)) < 2e-5
    # The cap reaches the log-probs: without it, these weights give other ones.
    logits = 3 * np.tanh(np.asarray(alone @ params["lm_head"]["kernel"], np.float64) / 3) / 0.8
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(scores[:, :-1], TEXTS[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(right_scores[:, 1:LENGTH], chosen, atol=3e-6)


@pytest.mark.parametrize(("dtype", "param_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_compute_dtype_is_independent_of_parameter_dtype(dtype, param_dtype, params, alone):
    config = dataclasses.replace(CONFIG, dtype=dtype, param_dtype=param_dtype)
    params_abstract = abstract_params(Decoder(config), make_mesh())
    assert {leaf.dtype for leaf in jax.tree.leaves(params_abstract)} == {jnp.dtype(param_dtype)}
    weights = jax.tree.map(lambda x, like: x.astype(like.dtype), params, params_abstract)
    text = jnp.asarray(TEXTS, jnp.int32)
    hidden = jit(lambda weights: Decoder(config).bind(weights)(text, jnp.ones_like(text, bool)))(weights)
    assert hidden.dtype == dtype
    error = jnp.sqrt(jnp.mean((hidden - alone) ** 2) / jnp.mean(alone**2))
    assert 1e-4 < error < 0.05


def test_trained_weight_gradients_stay_float32_under_bfloat16_compute(params):
    text, mask = jnp.asarray(TEXTS, jnp.int32), jnp.ones(TEXTS.shape, bool)
    towards = jnp.asarray(np.random.default_rng(2).standard_normal((*TEXTS.shape, CONFIG.width)), jnp.float32)

    def gradient(dtype):
        model = Decoder(dataclasses.replace(CONFIG, dtype=dtype))
        run = jit(jax.grad(lambda params: jnp.sum(model.bind(params)(text, mask) * towards)))
        gradient = run(params)
        assert not gradient.pop("lm_head")["kernel"].any()
        return gradient

    exact, actual = gradient("float32"), gradient("bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {jnp.dtype("float32")}
    flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (exact, actual)]
    cosine = flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])
    assert 0.99 < cosine < 1 - 1e-9
