"""Narrow weights on one CPU device: programs have no float32 copy of all of them, and compute what they did."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from train.models import Decoder, DecoderConfig, LoraConfig, layers
from train.rl.policy import ScoredPolicy, Sequences, hidden_states
from train.rollouts.sampler import Sampling, sample

SIZES = {"vocab_size": 2048, "width": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp_width": 128, "layers": 5}
MODEL = Decoder(
    DecoderConfig(
        **SIZES,
        dtype="bfloat16",
        param_dtype="bfloat16",
        tie_embeddings=True,
        lora=LoraConfig(rank=2, alpha=2.0, targets=("q_proj", "down_proj")),
    )
)
TOKENS, MASK = np.arange(12, dtype=np.int32).reshape(2, 6) % 7, np.ones((2, 6), bool)


def update(params: Any, adapter: Any) -> jax.Array:
    hidden = hidden_states(ScoredPolicy(MODEL, kljax.Policy(params, adapter)), Sequences.rows(TOKENS, MASK))
    return hidden.astype(jnp.float32).sum()


def decode(params: Any, adapter: Any) -> jax.Array:
    return sample(
        MODEL, kljax.Policy(params, adapter), TOKENS, MASK, key=jax.random.key(1), max_new_tokens=3,
        sampling=Sampling(temperature=1.0), eos_ids=[0], unroll=True,
    ).fields["rollout_log_probs"]  # fmt: skip


PROGRAMS = {"hidden states": update, "gradient of an adapter": jax.grad(update, argnums=1), "decode": decode}


@functools.cache
def weights() -> tuple[Any, Any]:
    params, adapter = jax.jit(MODEL.init)(jax.random.key(0))
    return params, jax.tree.map(lambda x: x + 0.01, adapter)


def compiled(name: str) -> tuple[np.ndarray, int]:
    """The results of a program as one vector, and the bytes of its temporaries."""
    program = jax.jit(functools.partial(PROGRAMS[name])).lower(*weights()).compile()
    results = [np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(program(*weights()))]
    return np.concatenate(results), program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_has_float32_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = sum(x.nbytes for x in jax.tree.leaves(weights()[0]))
    monkeypatch.setattr(layers, "COLUMNS", 256)
    results, temporary = compiled(name)
    assert temporary < stored
    # That the assertion above can fail, and that pieces change no number.
    for module in ("train.models.layers", "train.models.transformer", "train.models.head"):
        monkeypatch.setattr(f"{module}.in_pieces", lambda x: False)
    expected, more = compiled(name)
    assert more > stored
    np.testing.assert_array_equal(results, expected)


def test_gradients_reach_weights_read_in_pieces() -> None:
    rng = np.random.default_rng(0)
    stack, table = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((3, 4, 4), (5, 4)))
    ids = jnp.array([[4, 0], [4, 9]])

    def loss(stack: jax.Array, table: jax.Array) -> jax.Array:
        inputs, layer_at = layers.scanned_layers({"kernel": stack})
        assert inputs[0].shape == (3,)
        x = layers.take_rows(table, ids)
        x = jax.lax.scan(lambda x, step: (x @ layer_at(step)["kernel"], None), x, inputs)[0]
        return x.astype(jnp.float32).sum()

    def plain(stack: jax.Array, table: jax.Array) -> jax.Array:
        x = table[jnp.minimum(ids, 4)]
        for kernel in stack:
            x = x @ kernel
        return x.astype(jnp.float32).sum()

    actual, expected = (jax.jit(jax.grad(function, argnums=(0, 1)))(stack, table) for function in (loss, plain))
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0.02)


def test_the_pieces_of_the_head_overlap() -> None:
    rng = np.random.default_rng(0)
    hidden, table = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((2, 4), (2 * layers.COLUMNS - 3, 4))
    )
    wide = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T
    for tied, stored in ((True, table), (False, table.T)):
        logits = jax.jit(layers.narrow_logits, static_argnums=2, static_argnames="tied")(
            hidden, stored, jnp.dtype("float32"), tied=tied
        )
        np.testing.assert_allclose(logits, wide, rtol=1e-5, atol=1e-5)
