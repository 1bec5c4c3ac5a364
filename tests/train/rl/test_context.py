"""A mesh whose axis context splits the tokens of a row: the numbers of one device, and errors before device work."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.config.errors import ConfigError
from train.config.plan import Plan
from train.models import attention
from train.models.attention import AttentionOptions, attend
from train.models.attention.spans import row_spans
from train.models.sharding import make_mesh
from train.rl.keys import purpose_key
from train.rl.objective import coefficients
from train.rl.policy import ScoredPolicy, Sequences, hidden_states
from train.rl.step import make_prepare, make_score, make_update, update_rows
from train.run.setup import first_state
from train.sequences.batch import Batch

PROMPT = tiny.PROMPT - 1
OPTIONS = (
    f"data.max_prompt_length={PROMPT}",
    *("model.heads=4", "model.kv_heads=2", "optim.share_prompts=false", "optim.micro_batches=2"),
    *("kl.loss.coef=0.3", "kl.rollout.coef=0.2", "loss.entropy_coef=0.05"),
)
EVERY_AXIS = {"fsdp": 2, "context": 2, "tensor": 2}
FEWER_AXES = ({"context": 4}, {"context": 2}, {"fsdp": 2, "context": 2}, {"context": 2, "tensor": 2})


@functools.cache
def weights() -> dict:
    """Weights on the host, the same for every mesh, whichever is set where they are first asked for."""
    return jax.device_get(tiny.drawn(tiny.model_of(tiny.config_of(*OPTIONS)), jax.random.key(0)))


def narrow_batch() -> Batch:
    """Rows of 4 + 4 tokens: the longest prompts lack their first token."""
    batch = tiny.rollout_batch()
    longest = (batch.prompt_lengths > PROMPT)[:, None]
    narrow = jax.tree.map(lambda x: jnp.where(longest, x[:, 1:], x[:, :-1]) if x.ndim > 1 else x, batch)
    return dataclasses.replace(narrow, prompt_lengths=jnp.minimum(batch.prompt_lengths, PROMPT))


@functools.cache
def updated(mesh_shape, options=()):
    """Scored log-probs, loss and gradient of one update on a mesh."""
    config, mesh = tiny.config_of(*OPTIONS, *options), make_mesh(**dict(mesh_shape))
    model, optimizer = tiny.model_of(config), tiny.keep_gradient()
    with jax.set_mesh(mesh):
        params, other = (
            tiny.placed(kljax.Policy(item), model, mesh) for item in (weights(), tiny.moved(weights(), 0.1))
        )
        reference, state = (
            ScoredPolicy(model, other),
            first_state(Plan.of(config), model, mesh, params.params, optimizer),
        )
        batch = make_score(Plan.of(config), model, mesh)(state.trainable, None, reference, narrow_batch())
        scored = batch.ref_log_probs
        batch, _, _ = make_prepare(Plan.of(config), mesh)(batch, state.controllers)
        (rows,) = update_rows(config, purpose_key(0, "rows"))
        state, metrics = make_update(Plan.of(config), model, optimizer, state, mesh)(
            state, None, batch, rows, coefficients(config)
        )
        return jax.device_get((scored, metrics["loss"], state.opt_state["params"]))


def assert_close(actual, expected):
    scale = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    chex.assert_trees_all_close(actual, expected, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize(
    "mesh", [EVERY_AXIS, *(pytest.param(mesh, marks=pytest.mark.thorough) for mesh in FEWER_AXES)], ids=str
)
def test_loss_and_gradients_equal_one_device(mesh):
    expected, result = updated(()), updated(tuple(mesh.items()))
    assert np.abs(expected[0]).max() > 1
    for actual, entry in zip(result, expected, strict=True):
        assert_close(actual, entry)


def test_tokens_are_split_and_scored_on_their_device():
    """Here in four parts, with the hidden states of one device."""
    config, mesh = tiny.config_of(*OPTIONS), make_mesh(context=4)
    model, batch = tiny.model_of(config), narrow_batch()
    with jax.set_mesh(mesh):
        policy = tiny.placed(kljax.Policy(weights()), model, mesh)

        def run(policy):
            return hidden_states(ScoredPolicy(model, policy), Sequences.rows(batch.tokens, batch.token_mask))

        compiled = jax.jit(run).lower(policy).compile()
        hidden, text = compiled(policy), compiled.as_text()
    expected = jax.jit(hidden_states)(
        ScoredPolicy(model, kljax.Policy(weights())), Sequences.rows(batch.tokens, batch.token_mask)
    )
    mask = np.asarray(batch.token_mask)
    assert_close(np.asarray(hidden)[mask], np.asarray(expected)[mask])
    assert hidden.sharding.shard_shape(hidden.shape) == (tiny.ROWS, 2, 16)
    # The activations of the MLP of a device: two of its eight tokens.
    assert "f32[8,2,24]" in text
    assert not re.search(r"f32\[(64|8,8),24\]", text)


@pytest.mark.parametrize("window", [None, 100])
def test_kernel_of_split_queries_is_unchanged(window, monkeypatch):
    """Interpreted: what the kernel of TPUs computes, not how fast. Gradients with a window, the plain one forward."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, slope = (jax.random.normal(k, (2, 256, n, 8)) for k, n in zip(keys, (4, 2, 2, 4), strict=True))
    real = jnp.arange(256) >= jnp.array([[0], [37]])
    spans, options = row_spans(real, window), AttentionOptions(window is not None)

    def results(query, key, value):
        if window is None:
            return (attend(query, key, value, spans, options),)
        output, pull = jax.vjp(lambda *qkv: attend(*qkv, spans, options), query, key, value)
        return output, *pull(slope)

    run = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    expected = run(functools.partial(results))(query, key, value)
    function, lanes = attention._BY_BLOCKS["tpu"]
    monkeypatch.setitem(attention._BY_BLOCKS, "tpu", (functools.partial(function, interpret=True), lanes))
    monkeypatch.setattr(attention, "device_kind", lambda: "TPU v5 lite")
    with jax.set_mesh(make_mesh(context=2, tensor=2)):
        actual = run(functools.partial(results))(query, key, value)
    chex.assert_trees_all_close(actual, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("data.max_completion_length=6",),
            "data.max_completion_length: got 6, expected a multiple of mesh.context = 4",
        ),
        (("data.max_prompt_length=5",), "data.max_prompt_length: got 5, expected a multiple of mesh.context = 4"),
        (("optim.packing=true",), "optim.packing: got true with mesh.context = 4"),
        (("optim.share_prompts=true",), "optim.share_prompts: got true with mesh.context = 4"),
    ],
)
def test_sizes_not_divisible_by_the_axis_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        tiny.config_of(*OPTIONS, "mesh.context=4", *overrides)
