"""Attention over slots: every implementation against its formula, what it visits, and which one the devices take."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import forests
from train.models import Decoder, DecoderConfig, attention, sharding
from train.models.attention import AttentionOptions, attend, choose_implementation
from train.models.attention.blocks import attend_in_blocks
from train.models.attention.dense import attend_densely
from train.models.attention.spans import Spans, dense_mask, needed_blocks
from train.models.attention.tpu import tpu_attention
from train.models.attention.triton import triton_attention
from train.models.sharding import make_mesh

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 2, 16, 5
SINKS = np.array([-1.0, 0.5, 8.0, 2.0])
FORMS = {
    "dense": (96, attend_densely),
    "dense, split": (150, functools.partial(attend_densely, split=True)),
    "blocks": (96, functools.partial(attend_in_blocks, block=16)),
    "triton": (96, functools.partial(triton_attention, block=16, interpret=True)),
    "tpu": (256, functools.partial(tpu_attention, block=128, interpret=True)),
}
OPTIONS = [(False, None, None), (True, 2.0, SINKS)]


def inputs(width: int, dtype=jnp.float32, rows: int = 2, seed: int = 0):
    """Queries, keys, values, and a cotangent that is not 0 at padding."""
    rng = np.random.default_rng(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [jnp.asarray(rng.normal(size=(rows, width, count, HEAD_DIM)), dtype) for count in heads]


def formula(query, key, value, keys, *, scale, softcap, sinks):
    """The output in float64, under a mask [R, T, W]."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    key, value = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
    scores = scale * np.einsum("RTNH,RSNH->RNTS", query, key)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    weights = np.where(keys[:, None], np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None, None])
    return np.einsum("RNTS,RSNH->RTNH", weights / total, value)


def results(form, operands, spans: Spans, sliding, softcap, sinks, first: int = 0):
    """The output of the queries from slot `first` on, and the gradients to queries, keys, values and sinks."""
    *qkv, cotangent = operands
    start = spans.for_layer(sliding)[:, first:]
    given_sinks = () if sinks is None else (jnp.asarray(sinks, cotangent.dtype),)

    def run(query, key, value, *sinks):
        options = {"scale": 0.7, "softcap": softcap, "sinks": sinks[0] if sinks else None}
        return form(query[:, first:], key, value, spans.end, start, first, **options)

    @jax.jit
    def both(*arguments):
        output, pull = jax.vjp(run, *arguments)
        return output, *pull(cotangent[:, first:])

    return both(*qkv, *given_sinks)


@pytest.mark.parametrize(("sliding", "softcap", "sinks"), OPTIONS)
@pytest.mark.parametrize("kind", forests.KINDS)
@pytest.mark.parametrize("name", FORMS)
def test_attention_is_its_formula(name, kind, sliding, softcap, sinks):
    width, form = FORMS[name]
    forest = forests.draw(kind, width, np.random.default_rng(len(kind)), mean=width // 12)
    operands = inputs(width)
    output, *gradients = results(form, operands, forest.spans(WINDOW), sliding, softcap, sinks)
    keys = forest.keys(WINDOW if sliding else None)
    expected = formula(*operands[:3], keys, scale=0.7, softcap=softcap, sinks=sinks)
    np.testing.assert_allclose(output, expected, atol=3e-6)
    _, *others = results(attend_densely, operands, forest.spans(WINDOW), sliding, softcap, sinks)
    chex.assert_trees_all_close(gradients, others, atol=2e-5)


@pytest.mark.parametrize("name", ["blocks", "tpu", "triton"])
def test_queries_of_a_part_equal_all_queries(name):
    """The part of a device of axis context: its first query has a slot."""
    width, form = FORMS[name]
    spans, operands = forests.draw("trees", width, np.random.default_rng(1), mean=12).spans(WINDOW), inputs(width)
    output, *gradients = results(form, operands, spans, True, None, SINKS, first=width // 2)
    expected, *others = results(attend_densely, operands, spans, True, None, SINKS, first=width // 2)
    np.testing.assert_allclose(output, expected, atol=3e-6)
    chex.assert_trees_all_close(gradients, others, atol=2e-5)


@given(st.integers(0, 2**32), st.sampled_from(forests.KINDS), st.sampled_from([None, 1, 3, 40]))
@settings(max_examples=12, deadline=None)
def test_blocks_are_exact_in_float64(seed, kind, window):
    forest = forests.draw(kind, 64, np.random.default_rng(seed))
    with jax.enable_x64(True):
        operands, spans = inputs(64, jnp.float64, seed=seed), forest.spans(window)
        form = functools.partial(attend_in_blocks, block=16)
        actual = results(form, operands, spans, window is not None, 2.0, SINKS)
        expected = results(attend_densely, operands, spans, window is not None, 2.0, SINKS)
        assert actual[0].dtype == jnp.float64
        chex.assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [None, 1, WINDOW, 200])
@pytest.mark.parametrize("kind", forests.KINDS)
def test_spans_say_the_keys_of_a_path(kind, window):
    for seed in range(20):
        forest = forests.draw(kind, 48, np.random.default_rng(seed))
        spans = forest.spans(window)
        mask = dense_mask(spans.end, spans.for_layer(window is not None))
        np.testing.assert_array_equal(mask, forest.keys(window), err_msg=f"{seed}")


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kind", forests.KINDS)
def test_visited_blocks_are_the_needed_ones(kind, window):
    """Every block with a key is visited; one visited in vain lies between the extremes of its slots."""
    width, block = 256, 16
    forest = forests.draw(kind, width, np.random.default_rng(0), mean=width // 12)
    spans = forest.spans(window)
    visited = np.asarray(needed_blocks(spans.end, spans.for_layer(window is not None), block))
    pairs = forest.keys(window).reshape(2, width // block, block, width // block, block).any((2, 4))
    assert (visited >= pairs).all()
    causal = np.tri(width // block, dtype=bool)
    assert not visited[:, ~causal].any()
    if kind != "rows" or window is not None:
        assert visited.sum() < 0.8 * 2 * causal.sum()
    assert visited.sum() <= 1.3 * pairs.sum() + 2 * width // block


@pytest.mark.parametrize("shift", [16, 32, 64])
def test_sequence_has_equal_bits_wherever_it_starts_at_a_block(shift):
    block, length, width = 16, 64, 128
    alone = forests.draw("trees", length, np.random.default_rng(3), rows=1, mean=5).spans()
    form = functools.partial(attend_in_blocks, block=block)
    operands = inputs(length, rows=1)
    expected = results(form, operands, alone, False, None, None)

    def moved(x):
        return jnp.pad(x, ((0, 0), (shift, width - length - shift), (0, 0), (0, 0)), constant_values=1)

    slots = jnp.arange(width, dtype=jnp.int32)[None]
    inside = (shift <= slots) & (slots < shift + length)
    place = jnp.clip(slots - shift, 0, length - 1)
    later = Spans(
        jnp.where(inside, jnp.take_along_axis(alone.end, place, axis=1) + shift, slots + 1),
        jnp.where(inside, jnp.take_along_axis(alone.start, place, axis=1) + shift, slots),
    )
    actual = results(form, [moved(x) for x in operands], later, False, None, None)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x[:, shift : shift + length], y)


def test_no_array_has_two_axes_of_slots():
    width = 512
    spans = forests.draw("trees", width, np.random.default_rng(0), mean=40).spans(WINDOW)
    text = jax.jit(jax.grad(lambda *x: attend(*x, spans).sum(), (0, 1, 2))).lower(*inputs(width)[:3]).as_text()
    assert f"{width}x{width}" not in text
    assert "stablehlo.while" in text


GROUP = Spans(jnp.ones((2, 40), jnp.int32), jnp.zeros((2, 40), jnp.int32), group=(24, 8))
ROW = Spans(GROUP.end, GROUP.start, lengths=jnp.ones(2, jnp.int32))
OTHER = Spans(GROUP.end, GROUP.start)


@pytest.mark.parametrize(
    ("kind", "dtype", "softcap", "expected"),
    [
        ("cpu", jnp.bfloat16, None, ("dense", "dense", "dense")),
        ("TPU v5 lite", jnp.float32, None, ("tpu", "tpu", "tpu")),
        ("TPU7x", jnp.bfloat16, 50.0, ("tpu", "tpu", "tpu")),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, None, ("cudnn", "cudnn", "triton")),
        ("NVIDIA H100 80GB HBM3", jnp.float32, None, ("dense", "dense", "dense")),
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 50.0, ("triton", "triton", "triton")),
    ],
)
def test_implementation_follows_devices_and_rows(kind, dtype, softcap, expected, monkeypatch):
    monkeypatch.setattr(attention, "device_kind", lambda: kind)
    query, key, *_ = inputs(40, dtype)
    options = AttentionOptions(softcap=softcap)
    chosen = tuple(choose_implementation(query, key, spans, options) for spans in (ROW, GROUP, OTHER))
    assert chosen == expected
    without_cudnn = tuple("triton" if name == "cudnn" else name for name in expected)
    with_sinks = AttentionOptions(sinks=SINKS, softcap=softcap)
    assert choose_implementation(query, key, ROW, with_sinks) == without_cudnn[0]
    assert choose_implementation(query, key, ROW, AttentionOptions(kernels=False)) == "dense"
    with jax.set_mesh(make_mesh(2, 1, 2)):
        assert choose_implementation(query, key, ROW, options) == expected[0]
    with jax.set_mesh(make_mesh(4)):
        assert choose_implementation(query, key, ROW, options) == "dense"


def test_long_rows_without_a_kernel_go_in_blocks():
    query, key, *_ = inputs(192)
    assert choose_implementation(query, key, OTHER) == "dense"
    query, key, *_ = inputs(200)
    assert choose_implementation(query, key, OTHER) == "blocks"
    with jax.set_mesh(make_mesh(2, 1, 2)):
        assert choose_implementation(query, key, OTHER) == "blocks"
    with jax.set_mesh(make_mesh(4)):
        assert choose_implementation(query, key, OTHER) == "dense"


@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}, {"context": 4}, {"context": 2, "tensor": 2}])
def test_attention_is_equal_on_a_mesh(axes):
    """Rows of 200 slots are padded to whole blocks, in each part of an axis of tokens."""
    width = 200
    forest = forests.draw("trees", width, np.random.default_rng(2), mean=20)
    spans, operands = forest.spans(WINDOW), inputs(width)

    def run(query, key, value, cotangent):
        options = AttentionOptions(True, 0.7, None, jnp.asarray(SINKS, jnp.float32))
        output, pull = jax.vjp(lambda *x: attend(*x, spans, options), query, key, value)
        return output, *pull(cotangent)

    expected = jax.jit(run)(*operands)
    with jax.set_mesh(make_mesh(**axes)):
        actual = jax.jit(run)(*operands)
    chex.assert_trees_all_close(actual, expected, atol=2e-5)


def test_devices_are_read_from_the_mesh():
    assert sharding.device_kind() == "cpu"
    mesh = make_mesh(2)
    other = jax.sharding.AbstractDevice("TPU v6 lite", 1, "tpu")
    abstract = jax.sharding.AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=other
    )
    with jax.sharding.use_abstract_mesh(abstract):
        assert sharding.device_kind() == "TPU v6 lite"


def lowered(kind: str, platform: str, spans: Spans, monkeypatch) -> str:
    """The text of a layer's attention and its gradient on four devices, for a platform that is not here."""
    monkeypatch.setattr(attention, "device_kind", lambda: kind)
    query, key, value, _ = inputs(40, jnp.bfloat16)

    def loss(query, key, value, sliding):
        return attend(query, key, value, spans, AttentionOptions(sliding)).astype(jnp.float32).sum()

    with jax.set_mesh(make_mesh(2, 1, 2)):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(query, key, value, jnp.array(True))
        return traced.lower(lowering_platforms=(platform,)).as_text()


def with_window(spans: Spans) -> Spans:
    return Spans(spans.end, spans.start, spans.start, spans.lengths, 6, spans.group)


def test_a_tpu_gets_a_kernel_for_both_passes(monkeypatch):
    text = lowered("TPU v5 lite", "tpu", with_window(OTHER), monkeypatch)
    # Forward, and those of queries and of keys in the backward pass; one program for layers of both kinds.
    assert len(re.findall("@tpu_custom_call", text)) == 3
    assert "40x40x" not in re.sub("i1>", "", text)


@pytest.mark.parametrize(
    ("spans", "calls"),
    [(ROW, {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}),
     (GROUP, {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"})],
)  # fmt: skip
def test_a_gpu_gets_cudnn_for_rows_and_groups(spans, calls, monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    text = lowered("NVIDIA H100 80GB HBM3", "cuda", with_window(spans), monkeypatch)
    assert set(re.findall("__cudnn[$a-zA-Z]*", text)) == calls
    # Without a mask of the scores, where lengths say it.
    assert ("40x40x" in text) == (spans is GROUP and "24x24x" not in text)


def test_a_decoder_may_do_without_kernels(monkeypatch):
    monkeypatch.setattr(attention, "device_kind", lambda: "TPU v5 lite")
    tokens, mask = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)

    def traced(choice):
        shape = {"layers": 1, "width": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "mlp_width": 8}
        model = Decoder(DecoderConfig(vocab_size=8, attention=choice, **shape))
        return str(jax.make_jaxpr(lambda params: model.bind(params)(tokens, mask))(model.structure().params))

    assert "pallas_call" in traced("auto")
    assert "pallas_call" not in traced("xla")
