"""Computations of a policy: alignment, temperature, padding, values."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kljax
from kljax.log_probs._head import DEFAULTS
from tests import tiny
from train.models import Decoder, DecoderConfig, LoraConfig
from train.models import head as heads
from train.models.head import head, make_logits, stored_head
from train.models.parameters import bind, init_params, init_value_head
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, hidden_states, token_stats, token_values
from train.sequences.forest import row_forest

CONFIG = DecoderConfig(vocab_size=24, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
MODEL = Decoder(CONFIG)
TOKENS = np.random.default_rng(0).integers(0, 24, (3, 6)).astype(np.int32)
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]], bool)
# As one program: all processes import this module.
SEQUENCES = jax.jit(Sequences.rows)(TOKENS, MASK)

hidden_of = jax.jit(hidden_states)
stats_of = jax.jit(token_stats, static_argnames=("entropy", "tile"))


@functools.cache
def policy_of(model: Decoder, factor: float = 10.0) -> kljax.Policy:
    """With embeddings that matter: at their initial size every token is almost the same to the blocks."""
    params = tiny.drawn(model, jax.random.key(0))
    params["embed_tokens"]["embedding"] *= factor
    return kljax.Policy(params)


@pytest.mark.parametrize("tie", [False, True])
def test_statistics_belong_to_the_token_in_their_column(tie):
    model = Decoder(dataclasses.replace(CONFIG, tie_embeddings=tie))
    policy = policy_of(model)
    stats, _ = stats_of(ScoredPolicy(model, policy), SEQUENCES, temperature=0.7, entropy=True)
    hidden = hidden_of(ScoredPolicy(model, policy), SEQUENCES)
    kernel = np.asarray(policy.params["embed_tokens"]["embedding"]).T if tie else policy.params["lm_head"]["kernel"]
    np.testing.assert_array_equal(head(model, policy.params), kernel)
    np.testing.assert_array_equal(stored_head(model, policy.params), kernel.T if tie else kernel)
    log_probs = np.asarray(jax.nn.log_softmax(np.asarray(hidden) @ np.asarray(kernel) / 0.7))
    expected = np.take_along_axis(log_probs[:, :-1], TOKENS[:, 1:, None], axis=-1)[..., 0]
    entropy = -(np.exp(log_probs) * log_probs).sum(-1)[:, :-1]
    follows = MASK[:, 1:] & MASK[:, :-1]
    np.testing.assert_allclose(stats.log_prob[:, 1:], np.where(follows, expected, 0), atol=2e-6)
    np.testing.assert_allclose(stats.entropy[:, 1:], np.where(follows, entropy, 0), atol=2e-6)
    assert not stats.log_prob[:, 0].any()
    assert not stats.entropy[:, 0].any()
    assert stats.log_prob.dtype == jnp.float32
    assert stats.kl is None
    chex.assert_tree_all_finite((stats, hidden))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("largest", [0, 2**24])
def test_logits_of_both_layouts_are_the_product(tie, largest, dtype, monkeypatch):
    """Rounding: D = 16 products and sums of float32, each off by at most 2^-24 of the sum of absolute products."""
    monkeypatch.setattr(heads, "TRANSPOSED_BYTES", largest)
    model = Decoder(dataclasses.replace(CONFIG, tie_embeddings=tie))
    params = policy_of(model).params
    hidden = jnp.asarray(np.random.default_rng(3).normal(size=(5, CONFIG.width)), dtype)
    logits = jax.jit(lambda params, x: make_logits(model, params)(x, jnp.dtype("float32")))(params, hidden)
    wide, kernel = np.asarray(hidden, np.float64), np.asarray(head(model, params), np.float64)
    bound = 2 * CONFIG.width * 2.0**-24 * (np.abs(wide) @ np.abs(kernel))
    assert (np.abs(np.asarray(logits, np.float64) - wide @ kernel) <= bound).all()


def test_padding_changes_nothing():
    policy = policy_of(MODEL)
    near, _ = stats_of(ScoredPolicy(MODEL, policy), SEQUENCES, temperature=1.0, entropy=True)
    padding = np.full((1, 5), 7, np.int32)
    wide_row, wide_mask = np.concatenate([TOKENS[:1], padding], axis=1), np.arange(11)[None] < 6
    far, _ = stats_of(ScoredPolicy(MODEL, policy), Sequences.rows(wide_row, wide_mask), temperature=1.0)
    assert MASK[0].all()
    np.testing.assert_allclose(far.log_prob[:, :6], near.log_prob[:1], atol=1e-6)
    assert not far.log_prob[:, 6:].any()


def test_rows_padded_on_the_left_are_refused():
    with pytest.raises(ValueError, match=r"^token_mask: got tokens after padding, expected rows from column 0 on"):
        Sequences.rows(TOKENS, MASK[:, ::-1])


def test_only_the_tokens_of_the_mask_are_scored():
    policy, chosen = policy_of(MODEL), MASK & (np.arange(6) % 2 == 1)
    full, _ = stats_of(ScoredPolicy(MODEL, policy), SEQUENCES, temperature=1.0, entropy=True)
    part, _ = stats_of(ScoredPolicy(MODEL, policy), Sequences.rows(TOKENS, MASK, chosen), temperature=1.0, entropy=True)
    assert full.log_prob[chosen].any()
    for a, b in ((full.log_prob, part.log_prob), (full.entropy, part.entropy)):
        np.testing.assert_allclose(b, np.where(chosen, a, 0), atol=1e-6)


@pytest.mark.parametrize("tie", [False, True])
def test_exact_kl_compares_full_distributions(tie):
    model = Decoder(dataclasses.replace(CONFIG, tie_embeddings=tie))
    policy, other = policy_of(model), kljax.Policy(tiny.moved(policy_of(model).params, 0.1))

    def log_probs(one: kljax.Policy) -> np.ndarray:
        stored = np.asarray(stored_head(model, one.params), float)
        hidden = np.asarray(hidden_of(ScoredPolicy(model, one), SEQUENCES), float)
        logits = hidden @ (stored.T if tie else stored) / 0.7
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    mine, other_result = log_probs(policy), log_probs(other)
    expected = (np.exp(mine) * (mine - other_result)).sum(-1)[:, :-1]
    reference = kljax.ReferenceStates(
        hidden_of(ScoredPolicy(model, other), SEQUENCES), stored_head(model, other.params)
    )
    options = {"temperature": 0.7, "entropy": True, "tile": kljax.Tile(4, 7)}
    stats, _ = stats_of(ScoredPolicy(model, policy), SEQUENCES, reference=reference, **options)
    follows = MASK[:, 1:] & MASK[:, :-1]
    assert expected[follows].min() > 1e-3
    np.testing.assert_allclose(stats.kl[:, 1:], np.where(follows, expected, 0), rtol=1e-4, atol=1e-6)
    # Of the policy to itself, with the head that it shares: two programs differ in the last bits of a hidden state.
    itself = kljax.ReferenceStates(hidden_of(ScoredPolicy(model, policy), SEQUENCES))
    assert stats_of(ScoredPolicy(model, policy), SEQUENCES, reference=itself, **options)[0].kl.max() < 1e-12


def products(jaxpr: jax.extend.core.Jaxpr, columns: int) -> int:
    """The matrix products of a program with an axis of this size."""
    actual = 0
    for equation in jaxpr.eqns:
        shapes = [x.aval.shape for x in (*equation.invars, *equation.outvars)]
        actual += equation.primitive.name == "dot_general" and any(columns in shape for shape in shapes)
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, "jaxpr", parameter)
            actual += products(inner, columns) if hasattr(inner, "eqns") else 0
    return actual


@pytest.mark.parametrize(("trained", "passes"), [(1, 2), (0, 4)], ids=["adapter", "params"])
def test_frozen_head_is_traversed_once(trained, passes):
    """Logits and their slopes to the hidden states; with a gradient of the head, the logits again and that gradient."""
    model = Decoder(dataclasses.replace(CONFIG, lora=LoraConfig(2, 4.0, ("q_proj",)), vocab_size=23))
    weights = (model.structure().params, model.structure().adapter)

    def loss(params: dict, adapter: dict) -> jax.Array:
        policy = kljax.Policy(params, adapter)
        stats, _ = token_stats(
            ScoredPolicy(model, policy), Sequences.rows(TOKENS % 23, MASK), temperature=1.0, entropy="constant"
        )
        return stats.log_prob.sum()

    assert products(jax.make_jaxpr(jax.grad(loss, trained))(*weights).jaxpr, 23) == passes


def test_the_temperature_does_not_recompile():
    policy, traces = policy_of(MODEL), []

    @jax.jit
    def run(temperature: float) -> jax.Array:
        traces.append(1)
        return token_stats(ScoredPolicy(MODEL, policy), SEQUENCES, temperature=temperature)[0].log_prob

    assert jnp.abs(run(1.0) - run(0.5)).max() > 1e-3
    assert len(traces) == 1


def test_values_belong_to_the_state_before_the_token():
    value_head = init_value_head(MODEL, jax.random.key(1), make_mesh(1, 2, 1))
    assert value_head["kernel"].shape == (16,)
    assert not value_head["bias"]
    value_head = {"kernel": value_head["kernel"], "bias": jnp.float32(0.5)}
    hidden = jax.random.normal(jax.random.key(0), (2, 4, 16))
    values = token_values(value_head, hidden, row_forest(jnp.ones((2, 4), bool)))
    expected = np.asarray(hidden[:, :-1]) @ np.asarray(value_head["kernel"]) + 0.5
    np.testing.assert_allclose(values[:, 1:], expected, atol=1e-6)
    assert not values[:, 0].any()


def test_adapter_exists_only_with_lora():
    policy = policy_of(MODEL)
    adapted = Decoder(dataclasses.replace(CONFIG, lora=LoraConfig(2, 4.0, ("q_proj",))))
    assert not jax.tree.leaves(nnx.state(bind(adapted, policy), nnx.LoRAParam))
    with pytest.raises(ValueError, match="no lora section"):
        bind(MODEL, kljax.Policy(policy.params, {"layers": {}}))


@pytest.mark.thorough
def test_policy_is_the_same_on_every_mesh():
    def results(shape: tuple[int, int, int]) -> list[np.ndarray]:
        mesh = make_mesh(*shape)
        with jax.set_mesh(mesh):
            policy = kljax.Policy(init_params(MODEL, jax.random.key(0), mesh))
            tokens, mask = np.tile(TOKENS[:2], (4, 1)), np.tile(MASK[:2], (4, 1))

            def loss(params: dict) -> tuple[jax.Array, jax.Array]:
                stats, _ = token_stats(
                    ScoredPolicy(MODEL, kljax.Policy(params)), Sequences.rows(tokens, mask), temperature=1.0
                )
                return jnp.where(mask, stats.log_prob, 0).mean(), stats.log_prob

            grads, log_probs = jax.jit(jax.grad(loss, has_aux=True))(policy.params)
        return [np.asarray(log_probs), *map(np.asarray, jax.tree.leaves(grads))]

    single = results((1, 1, 1))
    for shape in ((8, 1, 1), (2, 2, 2)):
        for got, expected in zip(results(shape), single, strict=True):
            # 2e-6 of the largest entry: each entry is a sum over rows of terms of that size.
            np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert hidden_states(ScoredPolicy(MODEL, policy_of(MODEL)), SEQUENCES).shape == (3, 6, 16)


@pytest.mark.parametrize("attention", ["auto", "xla"])
def test_kernels_of_the_head_follow_the_switch_of_the_model(attention, monkeypatch):
    monkeypatch.setitem(DEFAULTS, "cpu", DEFAULTS["NVIDIA H"])
    config = dataclasses.replace(CONFIG, width=64, dtype="bfloat16", param_dtype="bfloat16", attention=attention)
    model = Decoder(config)
    policy = kljax.Policy(jax.eval_shape(lambda: init_params(model, jax.random.key(0), make_mesh())))
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        program = jax.make_jaxpr(lambda policy: token_stats(ScoredPolicy(model, policy), SEQUENCES, temperature=1.0))
        assert ("head_sums" in str(program(policy))) == (attention == "auto")
