"""The decoder: rotary positions, grouped queries, masks, depth."""

import dataclasses
import functools
import re
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import other_seeds, rounding
from train.models import Decoder, DecoderConfig, DecoderState, LayerKind, LoraConfig, Rope
from train.models.attention import attend
from train.models.attention.spans import dense_mask, row_spans, token_positions
from train.models.layers import RMSNorm, matmul
from train.models.parameters import init_params
from train.models.rope import apply_rope, rope_cos_sin
from train.models.sharding import make_mesh

CONFIG = DecoderConfig(
    vocab_size=24, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24, rope=Rope(100.0)
)


VARIANT = {"qkv_bias": True, "qk_norm": True, "tie_embeddings": True}


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def params_of(config: DecoderConfig, seed: int = 0) -> dict:
    return init_params(Decoder(config), jax.random.key(seed), make_mesh())


def scaled(params: dict, factor: float = 8.0) -> dict:
    """Larger weights, so that attention is far from uniform."""
    names = ("kernel", "embedding")
    return jax.tree_util.tree_map_with_path(lambda path, x: x * factor if path[-1].key in names else x, params)


def test_rope_scores_depend_on_the_distance_alone():
    query, key = drawn(2, 1, 1, 2, 8)

    @jax.jit
    def score(i: int, j: int) -> jax.Array:
        rotated = [
            apply_rope(x, rope_cos_sin(Rope(100.0), 8, jnp.array([[p]]), x.dtype)) for x, p in ((query, i), (key, j))
        ]
        return jnp.sum(rotated[0] * rotated[1], axis=-1)

    chex.assert_trees_all_close(score(7, 3), score(14, 10), score(4, 0), atol=1e-5)
    assert jnp.max(jnp.abs(score(7, 3) - score(7, 4))) > 1e-2


def test_rope_is_the_half_rotation_of_llama_checkpoints():
    x = np.asarray(jax.random.normal(jax.random.key(0), (1, 3, 1, 6)), np.float64)
    positions = np.array([[0, 2, 5]])
    angle = positions[..., None, None] * 50.0 ** (-np.arange(0, 6, 2) / 6)
    cos, sin = (np.concatenate([f(angle)] * 2, -1) for f in (np.cos, np.sin))
    rotated = np.concatenate([-x[..., 3:], x[..., :3]], -1)
    expected = x * cos + rotated * sin
    rope = rope_cos_sin(Rope(50.0), 6, jnp.asarray(positions), jnp.float32)
    np.testing.assert_allclose(apply_rope(jnp.float32(x), rope), expected, atol=1e-6)


def test_grouped_queries_equal_repeated_keys_and_values():
    shape = (2, 5)
    query, (key, value) = drawn(*shape, 6, 4), drawn(2, *shape, 2, 4, seed=1)
    spans = row_spans(jnp.array([[True] * 5, [False, False, True, True, True]]), None)
    actual = jax.jit(attend)(query, key, value, spans)
    mask = np.asarray(dense_mask(spans.end, spans.start))[:, None]
    wide_key, wide_value = (np.repeat(np.asarray(x, np.float64), 3, axis=2) for x in (key, value))
    exps = np.where(mask, np.exp(np.einsum("bqnh,bknh->bnqk", query, wide_key) / 2), 0)
    weights = exps / exps.sum(-1, keepdims=True)
    np.testing.assert_allclose(actual, np.einsum("bnqk,bknh->bqnh", weights, wide_value), rtol=0, atol=1e-6)


def test_padding_attends_to_itself_and_passes_no_gradient_to_tokens():
    real = jnp.array([[False] * 3, [False, True, True], [True, False, True]])
    spans = row_spans(real, None)

    @jax.jit
    def output_and_gradients(*qkv: jax.Array) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(lambda *qkv: attend(*qkv, spans), *qkv)
        of_padding, of_tokens = (jnp.where(there[..., None, None], 1.0, 0.0) for there in (~real, real))
        return output, pull(of_padding + jnp.zeros_like(output)), pull(of_tokens + jnp.zeros_like(output))

    query, key, value = drawn(3, 3, 3, 2, 4)
    output, of_padding, of_tokens = jax.device_get(output_and_gradients(query, key, value))
    np.testing.assert_allclose(output[~real], value[~real], rtol=1e-6)
    for padding, tokens in zip(of_padding, of_tokens, strict=True):
        assert np.isfinite(padding).all()
        assert not padding[real].any()
        assert not tokens[~real].any()
    assert of_tokens[2][real].all()


def test_positions_start_at_the_first_real_token():
    mask = jnp.array([[False, False, True, True, False], [True] * 5, [False] * 5])
    np.testing.assert_array_equal(token_positions(mask)[0, 2:4], [0, 1])
    np.testing.assert_array_equal(token_positions(mask)[1], range(5))
    assert token_positions(mask).min() == 0


def test_rms_norm_and_matmul_are_their_formulas():
    x = jax.random.normal(jax.random.key(0), (2, 3, 5)) * 3
    scale = jnp.arange(1.0, 6.0)
    expected = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 0.5) * scale
    norm = RMSNorm(5, eps=0.5)
    nnx.update(norm, {"scale": scale})
    chex.assert_trees_all_close(norm(x), expected, rtol=1e-6)
    kernel = jax.random.normal(jax.random.key(1), (5, 7))
    chex.assert_trees_all_close(matmul(x, kernel), jnp.einsum("abi,io->abo", x, kernel), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", [{}, VARIANT])
def test_names_and_shapes_match_llama_and_qwen(variant):
    params = params_of(dataclasses.replace(CONFIG, **variant))
    attention = params["layers"]["self_attn"]
    assert attention["q_proj"]["kernel"].shape == (2, 16, 16)
    assert attention["k_proj"]["kernel"].shape == attention["v_proj"]["kernel"].shape == (2, 16, 8)
    assert attention["o_proj"]["kernel"].shape == (2, 16, 16)
    assert params["layers"]["mlp"]["down_proj"]["kernel"].shape == (2, 24, 16)
    assert set(params["layers"]) == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    assert params["embed_tokens"]["embedding"].shape == (24, 16)
    assert ("lm_head" in params) == (not variant)
    assert ("q_norm" in attention) == ("bias" in attention["v_proj"]) == bool(variant)
    assert "bias" not in attention["o_proj"]
    std = {name: float(attention[name]["kernel"].std()) for name in ("q_proj", "o_proj")}
    assert std["q_proj"] == pytest.approx(16**-0.5, rel=0.15)
    assert std["o_proj"] == pytest.approx((16 * 4) ** -0.5, rel=0.15)


def test_seed_determines_the_weights():
    """Recorded results and shipped seeds depend on them."""
    biased = dataclasses.replace(CONFIG, layers=3, qkv_bias=True, qk_norm=True, lora=LoraConfig(2, 1.0, ("q_proj",)))
    draw = jax.jit(Decoder(biased).init)
    (params, _), (_, adapter) = draw(other_seeds.example_key(3)), draw(other_seeds.example_key(4))
    plain = init_params(Decoder(CONFIG), other_seeds.example_key(3), make_mesh())
    for leaf, first, last in (
        (params["embed_tokens"]["embedding"], -0.011517874, -0.016611278),
        (params["layers"]["mlp"]["up_proj"]["kernel"], -0.28696004, -0.14535615),
        (params["layers"]["self_attn"]["q_proj"]["kernel"], 0.09158241, 0.42390397),
        (adapter["layers"]["self_attn"]["q_proj"]["lora_A"], 0.1808421, -0.16043556),
        (plain["layers"]["self_attn"]["q_proj"]["kernel"], -0.276742, -0.15634674),
        (plain["lm_head"]["kernel"], -0.46391812, 0.5003273),
    ):
        np.testing.assert_allclose(leaf.ravel()[jnp.array([0, -1])], [first, last], rtol=2e-7)


def test_future_and_padding_tokens_reach_no_output():
    config = dataclasses.replace(CONFIG, **VARIANT)
    model, params = Decoder(config), scaled(params_of(config))
    tokens = jax.random.randint(jax.random.key(0), (1, 6), 0, 24)
    mask = jnp.array([[False, True, True, True, True, False]])
    run = jax.jit(lambda tokens: model.bind(params)(tokens, mask))
    base = run(tokens)
    chex.assert_trees_all_equal(run(tokens.at[0, 0].set(3).at[0, 5].set(7))[:, 1:5], base[:, 1:5])
    changed = run(tokens.at[0, 3].set((tokens[0, 3] + 1) % 24))
    chex.assert_trees_all_equal(changed[:, :3], base[:, :3])
    assert (jnp.abs(changed - base)[0, 3:5].max(axis=-1) > 1e-3).all()


def test_gradients_are_finite_with_a_fully_padded_row():
    model, params = Decoder(CONFIG), params_of(CONFIG)
    tokens = jnp.zeros((2, 4), jnp.int32)
    mask = jnp.array([[False] * 4, [False, True, True, True]])

    def total(params: dict, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mask[..., None], model.bind(params)(tokens, mask), 0) ** 3)

    grad = jax.jit(jax.grad(total))
    padded = grad(params, tokens, mask)
    chex.assert_tree_all_finite(padded)
    assert jnp.abs(padded["layers"]["self_attn"]["v_proj"]["kernel"]).max() > 0
    # Both rows real. Entries are sums of terms of order 10 that cancel, so the float32 error is relative to those.
    twice = grad(params, tokens, jnp.broadcast_to(mask[1], mask.shape))
    chex.assert_trees_all_close(padded, jax.tree.map(lambda x: x / 2, twice), rtol=1e-6, atol=2e-5)


def test_saved_projections_are_not_computed_again():
    """The same gradient from fewer products: seven projections a layer are those of the one pass forward."""
    params, tokens = params_of(CONFIG), jnp.arange(10).reshape(2, 5) % 24
    mask = jnp.ones(tokens.shape, bool)

    def gradient(remat: str) -> tuple[dict, int]:
        model = Decoder(dataclasses.replace(CONFIG, remat=remat))

        def loss(params: dict) -> jax.Array:
            return (model.bind(params)(tokens, mask) ** 2).sum()

        traced = jax.jit(jax.grad(loss)).trace(params)
        lowered = traced.lower()
        return lowered.compile()(params), lowered.as_text().count("stablehlo.dot_general")

    (full, all_products), (dots, products) = gradient("full"), gradient("dots")
    chex.assert_trees_all_close(dots, full, rtol=1e-6, atol=1e-7)
    # The output of down_proj is read by nothing in the backward pass, with or without.
    assert all_products - products == 6


def test_saved_attention_is_not_computed_again():
    """Of rows in blocks: the loops over queries and keys are those of one pass forward and one backward."""

    def loops(remat: str) -> int:
        model = Decoder(dataclasses.replace(CONFIG, remat=remat))
        tokens = jax.ShapeDtypeStruct((1, 256), jnp.int32)

        def loss(params: dict, tokens: jax.Array) -> jax.Array:
            return (model.bind(params)(tokens, jnp.ones(tokens.shape, bool)) ** 2).sum()

        lowered = jax.jit(jax.grad(loss)).trace(model.structure().params, tokens).lower()
        return lowered.as_text().count("stablehlo.while")

    assert loops("full") - loops("dots") == 2


@pytest.mark.parametrize("sliding", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_depth_changes_neither_the_trace_nor_the_operations(sliding):
    """Also with layers of two kinds: the differences between layers are arrays."""

    def operations(layers: int) -> tuple[int, Counter[str]]:
        pattern = (LayerKind(), LayerKind(), LayerKind("sliding" if sliding else "full"))
        config = dataclasses.replace(
            CONFIG, layers=layers, pattern=pattern, sliding_window=2 if sliding else None, local_rope=Rope(10.0)
        )
        model = Decoder(config)
        shapes = model.structure().params
        tokens, mask = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool)

        def loss(params: dict) -> jax.Array:
            return model.bind(params)(tokens, mask).sum()

        traced = jax.jit(jax.grad(loss)).trace(shapes)
        names = re.findall(r"stablehlo\.[a-z_]+", traced.lower().as_text())
        return len(str(traced.jaxpr)), Counter(names)

    (text_4, found_4), (text_12, found_12) = operations(4), operations(12)
    assert found_4 == found_12
    assert found_4["stablehlo.while"] == 2
    assert abs(text_12 - text_4) < 0.01 * text_4


@functools.cache
def whole_sequences() -> tuple[Decoder, dict, jax.Array, jax.Array, jax.Array, DecoderState]:
    """Two rows of different lengths, their hidden states, and the cache of their first four columns."""
    model, params = Decoder(CONFIG), scaled(params_of(CONFIG), 3.0)
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, 24)
    mask = jnp.arange(7) >= jnp.array([[0], [3]])

    @jax.jit
    def run(params: dict) -> tuple[jax.Array, DecoderState]:
        prompts = model.bind(params).prefill(tokens[:, :4], mask[:, :4])[1]
        return model.bind(params)(tokens, mask), DecoderState.of(prompts, 1, 4)

    return model, params, tokens, mask, *run(params)


@pytest.mark.parametrize("unroll", [False, True])
def test_decoded_tokens_equal_tokens_of_full_sequences(unroll):
    """In a stack of caches and in a list of them; the last column stays empty."""
    (model, params, tokens, mask, expected, cache), width = whole_sequences(), 4
    decoder = model.bind(params).unrolled() if unroll else model.bind(params)
    decode = jax.jit(decoder.decode)
    if unroll:
        cache = dataclasses.replace(cache, stacks=tuple(stack.layers() for stack in cache.stacks), unrolled=True)
    hidden_of = jax.jit(lambda params: model.bind(params)(tokens, mask))
    for column in range(width, width + 3):
        bound = rounding.of_weights(
            lambda params, column=column: hidden_of(params)[:, column], params, longest_sum=CONFIG.mlp_width
        )
        seen = jnp.pad(mask, ((0, 0), (0, 1))) & (jnp.arange(width + 4) <= column)
        position = seen.sum(-1) - 1
        before, (hidden, cache, _) = cache, decode(tokens[:, column], position, cache, seen, jnp.int32(column))
        rounding.assert_close_by_norm(hidden, expected[:, column], roundings=bound)
        planted = rounding.planted(hidden, roundings=10 * bound)
        with pytest.raises(AssertionError, match="roundings of the norm"):
            rounding.assert_close_by_norm(planted, expected[:, column], roundings=bound)
        others = jnp.arange(4) != column - width
        for old, new in zip(*(s.stacks[0] if unroll else s.stacks for s in (before, cache)), strict=True):
            chex.assert_trees_all_equal(old.prompts, new.prompts)
            parts = [jax.tree.map(np.asarray, c.completions) for c in (old, new)]
            selected = [
                (c.key[..., others] if unroll else c.key[..., others, :], c.value[..., others, :]) for c in parts
            ]
            chex.assert_trees_all_equal(*selected)


@pytest.mark.parametrize(("field", "value"), [("kv_heads", 3), ("head_dim", 5)])
def test_impossible_shapes_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}: got {value}"):
        dataclasses.replace(CONFIG, **{field: value})


@pytest.mark.parametrize("tied", [False, True])
def test_constant_embedding_has_no_gradient_through_inputs(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params, tokens = params_of(config), jnp.array([[3, 5, 3, 7]])

    def gradient(constant: int | None) -> jax.Array:
        decoder = Decoder(dataclasses.replace(config, constant_embedding=constant))

        def loss(params: dict) -> jax.Array:
            model = decoder.bind(params)
            return jnp.sum(model(tokens, jnp.ones_like(tokens, bool)) ** 3)

        return jax.grad(loss)(params)["embed_tokens"]["embedding"]

    plain, constant = gradient(None), gradient(3)
    assert jnp.max(jnp.abs(plain[3])) > 1e-3
    assert not constant[3].any()
    np.testing.assert_array_equal(constant[jnp.array([5, 7])], plain[jnp.array([5, 7])])
