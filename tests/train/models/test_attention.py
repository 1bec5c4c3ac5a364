"""Attention: kernels against XLA's own products, which one is taken, and that each can be lowered for its devices."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rounding import assert_close_by_norm, of_sum
from train.models import Decoder, DecoderConfig, attention, kernels
from train.models.attention import AttentionMask, AttentionOptions, attend, causal_mask
from train.models.kernels import choose_kernel, splash_attention
from train.models.sharding import make_mesh

ROWS, LENGTH, HEADS, KV_HEADS, WIDTH, WINDOW = 2, 40, 4, 2, 16, 5
MASK = np.stack([np.arange(LENGTH) >= 7, np.arange(LENGTH) < 33])
# As in packed rows: sequences of a row do not attend to each other.
SEGMENTS = np.stack([np.zeros(LENGTH, np.int32), np.arange(LENGTH, dtype=np.int32) // 12])
SAME = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])[:, None]
CAUSAL = causal_mask(MASK, WINDOW)
ATTENTION_MASK = AttentionMask(
    CAUSAL.full & SAME, CAUSAL.sliding & SAME, jnp.where(MASK, SEGMENTS + 1, 0), CAUSAL.window
)
SINKS = np.array([-1.0, 0.5, 8.0, 2.0], np.float32)


def inputs(dtype=jnp.float32, length=LENGTH):
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [jax.random.normal(key, (ROWS, length, count, WIDTH), dtype) for key, count in zip(keys, heads, strict=True)]


def reference(query, key, value, *, sliding, scale, softcap, sinks):
    """Float64, a query at a time."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    output = np.zeros_like(query)
    for row, at, head in np.ndindex(ROWS, LENGTH, HEADS):
        seen = [s for s in range(at + 1) if MASK[row, s] and MASK[row, at] and SEGMENTS[row, s] == SEGMENTS[row, at]]
        seen = seen[-WINDOW:] if sliding else seen
        if seen:
            scores = scale * key[row, seen, head // (HEADS // KV_HEADS)] @ query[row, at, head]
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores)
            total = weights.sum() + (0 if sinks is None else np.exp(np.float64(sinks[head])))
            output[row, at, head] = weights @ value[row, seen, head // (HEADS // KV_HEADS)] / total
    return output


@pytest.mark.parametrize(("sliding", "softcap", "sinks"), [(False, None, None), (True, 2.0, None), (True, None, SINKS)])
def test_attention_is_its_formula(sliding, softcap, sinks):
    output = attend(*inputs(), ATTENTION_MASK, AttentionOptions(sliding, 0.7, softcap, sinks))
    expected = reference(*inputs(), sliding=sliding, scale=0.7, softcap=softcap, sinks=sinks)
    np.testing.assert_allclose(output, expected, atol=2e-6)
    assert not output[~MASK].any()


@pytest.mark.parametrize(("sliding", "softcap"), [(False, None), (True, 2.0)])
@pytest.mark.parametrize("first", [0, 13])
def test_query_blocks_equal_one_block(sliding, softcap, first, monkeypatch):
    """Blocks of unequal lengths, 40 or 27 queries in fives; the cotangent of padding is not 0."""
    mask = jax.tree.map(lambda x: x[:, :, first:] if x.ndim == 4 else x, ATTENTION_MASK)
    query, key, value = inputs()

    def results():
        run = functools.partial(attend, mask=mask, options=AttentionOptions(sliding, 0.7, softcap))
        output, pull = jax.vjp(run, query[:, first:], key, value)
        return output, *pull(jax.random.normal(jax.random.key(1), output.shape))

    expected = jax.jit(lambda: results())()  # noqa: PLW0108
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    actual = jax.jit(lambda: results())()  # noqa: PLW0108
    # The longest sum has a term for each key; a gradient passes scores, softmax and values twice.
    assert_close_by_norm(actual, expected, roundings=2 * math.sqrt(2 * 3) * of_sum(LENGTH))


def test_query_blocks_leave_out_masked_scores():
    length = 8 * attention.QUERY_BLOCK
    mask = causal_mask(np.ones((ROWS, length), bool), None)

    def flops(mask):
        compiled = jax.jit(lambda *x: attend(*x, mask)).lower(*inputs(length=length)).compile()
        return compiled.cost_analysis()["flops"]

    assert flops(mask) / flops(AttentionMask(mask.full)) < 0.6


@pytest.mark.parametrize(("sliding", "softcap"), [(False, None), (True, 2.0)])
def test_splash_attention_is_the_same_with_its_gradient(sliding, softcap, monkeypatch):
    """Interpreted: what the kernel computes, not how fast. Gradients with everything, the plain one forward."""

    def interpreted(*args, **options):
        return splash_attention(*args, **options, interpret=True)

    def run(query, key, value, sinks=None):
        return attend(query, key, value, ATTENTION_MASK, AttentionOptions(sliding, 0.7, softcap, sinks))

    def results():
        if not sliding:
            return (run(*inputs()),)
        output, pull = jax.vjp(run, *inputs(), jnp.array(SINKS))
        return output, *pull(jax.random.normal(jax.random.key(1), output.shape))

    def computed():
        # Most of the time goes into the compiler.
        return jax.jit(lambda: results()).lower().compile({"xla_backend_optimization_level": 0})()  # noqa: PLW0108

    expected = computed()
    monkeypatch.setattr(attention, "splash_attention", interpreted)
    monkeypatch.setattr(kernels, "device_kind", lambda: "TPU v5 lite")
    actual = computed()
    chex.assert_trees_all_close(actual, expected, atol=5e-6)
    for x in actual[:4]:
        assert not x[~MASK].any()


@pytest.mark.parametrize(
    ("kind", "dtype", "softcap", "expected"),
    [
        ("cpu", jnp.bfloat16, None, None),
        ("TPU v5 lite", jnp.float32, None, "splash"),
        ("TPU7x", jnp.bfloat16, 50.0, "splash"),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, None, "cudnn"),
        ("NVIDIA H100 80GB HBM3", jnp.float32, None, None),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 50.0, None),
    ],
)
def test_the_kernel_follows_the_devices(kind, dtype, softcap, expected, monkeypatch):
    monkeypatch.setattr(kernels, "device_kind", lambda: kind)
    query, key, _ = inputs(dtype)
    assert choose_kernel(query, key, softcap) == expected
    assert choose_kernel(query, key, softcap, SINKS) == (None if expected == "cudnn" else expected)
    with jax.set_mesh(make_mesh(2, 1, 2)):
        assert choose_kernel(query, key, softcap) == expected
    with jax.set_mesh(make_mesh(4)):
        assert choose_kernel(query, key, softcap) is None


def test_devices_are_read_from_the_mesh():
    assert kernels.device_kind() == "cpu"
    mesh = make_mesh(2)
    other = jax.sharding.AbstractDevice("TPU v6 lite", 1, "tpu")
    abstract = jax.sharding.AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=other
    )
    with jax.sharding.use_abstract_mesh(abstract):
        assert kernels.device_kind() == "TPU v6 lite"


def lowered(kind, platform, monkeypatch):
    """The text of a layer's attention and its gradient on four devices, for a platform that is not here."""
    monkeypatch.setattr(kernels, "device_kind", lambda: kind)
    query, key, value = inputs(jnp.bfloat16)

    def loss(query, key, value, sliding):
        return attend(query, key, value, ATTENTION_MASK, AttentionOptions(sliding)).astype(jnp.float32).sum()

    with jax.set_mesh(make_mesh(2, 1, 2)):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(query, key, value, jnp.array(True))
        return traced.lower(lowering_platforms=(platform,)).as_text()


def test_a_tpu_gets_splash_attention(monkeypatch):
    text = lowered("TPU v5 lite", "tpu", monkeypatch)
    # Forward, and dq, dkv in the backward pass, for a layer of either kind.
    assert len(re.findall("@tpu_custom_call", text)) == 6
    assert f"{LENGTH}x{LENGTH}x" not in re.sub("i1>", "", text)


def test_a_decoder_may_do_without_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "device_kind", lambda: "TPU v5 lite")
    tokens, mask = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)

    def traced(attention):
        shape = {"layers": 1, "width": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "mlp_width": 8}
        model = Decoder(DecoderConfig(vocab_size=8, attention=attention, **shape))
        return str(jax.make_jaxpr(lambda params: model.bind(params)(tokens, mask))(model.structure().params))

    assert "pallas_call" in traced("auto")
    assert "pallas_call" not in traced("xla")


def test_a_gpu_gets_cudnn(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    text = lowered("NVIDIA H100 80GB HBM3", "cuda", monkeypatch)
    assert set(re.findall("__cudnn[$a-zA-Z]*", text)) == {
        "__cudnn$fmhaScaleBiasSoftmax",
        "__cudnn$fmhaScaleBiasSoftmaxBackward",
    }
