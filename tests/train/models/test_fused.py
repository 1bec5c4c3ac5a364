"""The kernels of NVIDIA GPUs for norms, heads and gated products: Pallas' interpreter against the compiler's form."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from train.models import Decoder, DecoderConfig, LoraConfig, projections, self_attention, sharding
from train.models.attention.cudnn import split_groups
from train.models.cache import DecoderState
from train.models.config import PROJECTIONS, LayerKind
from train.models.fused import gated, heads, norms
from train.models.parameters import bind, init_adapter, init_params
from train.models.rope import CosSin, apply_rope
from train.models.sharding import make_mesh
from train.sequences.forest import group_forest, row_forest

LORA = LoraConfig(rank=4, alpha=8.0, targets=PROJECTIONS)
QWEN = DecoderConfig(
    vocab_size=24, layers=2, width=32, heads=4, kv_heads=2, head_dim=16, mlp_width=48, qk_norm=True, lora=LORA
)
GEMMA = dataclasses.replace(
    QWEN, lora=None, activation="gelu_tanh", norm_offset=True, post_norms=True, sliding_window=5,
    pattern=(LayerKind("sliding"), LayerKind("full")),
)  # fmt: skip
CONFIGS = {
    "adapter": QWEN,
    "offsets, windows and GELU": GEMMA,
    "biases and no norm of heads": dataclasses.replace(QWEN, qk_norm=False, qkv_bias=True, mlp_bias=True),
}
MESHES = {"fsdp": {"fsdp": 4}, "tensor": {"data": 2, "tensor": 2}, "context": {"fsdp": 2, "context": 2}}
PROMPT, LENGTH, GROUP = 6, 10, 3


@pytest.fixture
def fused(monkeypatch):
    """Lets CPUs run the kernels of GPUs, in blocks of few tokens, and joins all adapters."""

    def can_join(linears, dtype):
        return any(linear.lora_scale is not None for linear in linears)

    monkeypatch.setattr(projections, "can_join", can_join)
    monkeypatch.setattr(projections, "joins", lambda x, linears: can_join(linears, x.dtype))
    for module in (gated, heads, norms):
        monkeypatch.setattr(module, "can_fuse", lambda *_: True)
    for module in (heads, norms):
        monkeypatch.setattr(module, "ELEMENTS", 64)
    monkeypatch.setattr(gated, "COLUMNS", 32)
    monkeypatch.setattr(self_attention, "choose_implementation", lambda *_: "cudnn")
    attend = jax.nn.dot_product_attention

    def without_cudnn(*operands, implementation=None, **options):
        return attend(*operands, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)


def pulled(function, seed=0):
    """The results of a function of no argument's, and the gradients of a weighted sum of them."""

    def run(*arguments):
        results, pull = jax.vjp(function, *arguments)
        keys = iter(jax.random.split(jax.random.key(seed), 100))
        return results, pull(jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype), results))

    return jax.jit(run)


def random(*shapes):
    keys = jax.random.split(jax.random.key(9), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize(
    ("group", "normed", "joined"), [(None, True, True), ((6, 9), True, False), ((9, 3), False, True)]
)
def test_heads_are_their_formula(fused, group, normed, joined):
    statics = heads.HeadStatics(4, 2, 16, group, offset=group is None, interpret=True)
    width = 21 if group is None else group[0] + 3 * group[1]
    *projected, cos, sin, first, second = random(
        *((2, width, 16 * count) for count in (4, 2, 2)), (2, width, 8), (2, width, 8), (16,), (16,)
    )
    scales = (first, second) if normed else None

    def kernel(projected, scales):
        whole = [jnp.concatenate(projected, axis=-1)] if joined else projected
        return heads.qkv_heads(statics, whole, scales, cos, sin)

    def formula(projected, scales):
        query, key, value = (x.reshape(2, width, -1, 16) for x in projected)
        if scales is not None:
            query, key = (
                x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (scale + statics.offset)
                for x, scale in zip((query, key), scales, strict=True)
            )
        query, key = (apply_rope(x, CosSin(cos[:, :, None], sin[:, :, None])) for x in (query, key))
        return (query, key, value) if group is None else split_groups(query, key, value, group)

    actual, expected = (pulled(form)(projected, scales) for form in (kernel, formula))
    chex.assert_trees_all_close(jax.tree.leaves(actual), jax.tree.leaves(expected), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("width", "room", "offset"), [(24, 5, False), (32, 0, True)])
def test_norm_and_residual_are_their_formula(fused, width, room, offset):
    statics = norms.NormStatics(1e-6, offset, room, interpret=True)

    def formula(x, scale):
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (scale + offset)
        return jnp.pad(normed, ((0, 0), (0, 0), (0, room))), x

    forms = functools.partial(norms.fork_by_kernel, statics), formula
    actual, expected = (pulled(form)(*random((2, 37, width), (width,))) for form in forms)
    chex.assert_trees_all_close(actual, expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gradient_of_a_gated_product_is_its_formula(fused, activation):
    gate, up, cotangent = random(*[(2, 19, 40)] * 3)
    # Where the derivative of GELU is nearly 0, that of JAX loses all digits.
    gate = jnp.clip(gate, -2, 2)
    act = jax.nn.silu if activation == "silu" else functools.partial(jax.nn.gelu, approximate=True)
    product, pull = jax.vjp(lambda gate, up: act(gate) * up, gate, up)
    expected = product, pull(cotangent)
    apart = gated.gated_gradient(activation, (gate, up), cotangent, interpret=True)
    chex.assert_trees_all_close(apart, expected, atol=1e-5, rtol=1e-5)
    both = jnp.concatenate([gate, up], axis=-1)
    _, (together,) = gated.gated_gradient(activation, (both,), cotangent, interpret=True)
    chex.assert_trees_all_close(together, jnp.concatenate(expected[1], axis=-1), atol=1e-5, rtol=1e-5)


@functools.cache
def policy_of(name, mesh):
    """A decoder's policy, with weights that bfloat16 has exactly and an adapter of which no half is 0."""
    model = Decoder(CONFIGS[name])
    params = init_params(model, jax.random.key(0), mesh)
    keys = iter(jax.random.split(jax.random.key(2), 100))

    def drawn(x):
        return x + 0.1 * jax.random.normal(next(keys), x.shape)

    params = jax.tree.map(lambda x: drawn(x).astype(jnp.bfloat16).astype(x.dtype), params)
    lora = CONFIGS[name].lora is not None
    return kljax.Policy(params, jax.tree.map(drawn, init_adapter(model, jax.random.key(1), mesh)) if lora else None)


@functools.cache
def computed(form, name="adapter", dtype="float32", rows="groups", mesh=None):
    """Hidden states of rows or groups whose prompts and completions have any length, and all gradients of a sum.

    The fixture `fused` is in use where the form is "kernels".
    """
    assert (self_attention.heads.can_fuse(128, jnp.float32)) == (form == "kernels")
    mesh = make_mesh(**MESHES[mesh]) if mesh else make_mesh()
    model = Decoder(dataclasses.replace(CONFIGS[name], dtype=dtype))
    policy = policy_of(name, mesh)
    sizes = jnp.array([[6, 10], [6, 1], [6, 7], [2, 3], [2, 10], [2, 0]] * 2)
    slots = jnp.arange(PROMPT + LENGTH)
    mask = slots < sizes.sum(1, keepdims=True)
    prompts = jnp.repeat(jax.random.randint(jax.random.key(3), (4, len(slots)), 0, 24), GROUP, axis=0)
    completions = jax.random.randint(jax.random.key(4), (4 * GROUP, len(slots)), 0, 24)
    tokens = jnp.where(slots < sizes[:, :1], prompts, completions)
    if rows == "groups":
        forest = group_forest(mask, sizes[:, 0], (PROMPT, LENGTH), GROUP)
    else:
        forest = row_forest(mask, sizes[:, 0], LENGTH)
    weights = jax.random.normal(jax.random.key(5), (*forest.depth.shape, 32))
    real = forest.readers[..., 0] >= 0

    def loss(trained, frozen):
        policy = kljax.Policy(frozen, trained) if frozen is not None else kljax.Policy(trained)
        spans = forest.spans(CONFIGS[name].sliding_window)
        hidden, _ = bind(model, policy).run(forest.take(tokens), real, forest.depth, spans)
        hidden = jnp.where(real[..., None], hidden.astype(jnp.float32), 0)
        return jnp.sum(hidden * weights), hidden

    arguments = (policy.params, None) if policy.adapter is None else (policy.adapter, policy.params)
    with jax.set_mesh(mesh):
        (_, hidden), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(*arguments)
    return jax.device_get((hidden, gradients))


CASES = [*((name, "groups") for name in CONFIGS), ("adapter", "rows")]


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_fused_layers_equal_the_form_of_the_compiler(request, name, rows):
    expected = computed("compiler", name, rows=rows)
    request.getfixturevalue("fused")
    chex.assert_trees_all_close(computed("kernels", name, rows=rows), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mesh", MESHES)
def test_fused_layers_are_equal_on_a_mesh(fused, mesh):
    rows = "rows" if mesh == "context" else "groups"
    split = computed("kernels", rows=rows, mesh=mesh)
    chex.assert_trees_all_close(split, computed("kernels", rows=rows), atol=2e-4, rtol=2e-4)


@functools.cache
def decoded(form, name="adapter", mesh=None):
    """Hidden states of two decode steps of two rows for each prompt, and the caches after them."""
    assert (self_attention.heads.can_fuse(128, jnp.float32)) == (form == "kernels")
    mesh = make_mesh(**MESHES[mesh]) if mesh else make_mesh()
    model = Decoder(CONFIGS[name])
    policy = policy_of(name, mesh)
    tokens = jax.random.randint(jax.random.key(1), (4, 5), 0, 24)
    mask = jnp.arange(5) >= jnp.array([[0], [2], [0], [3]])
    following = jax.random.randint(jax.random.key(2), (2, 8), 0, 24)

    @jax.jit
    def run(policy):
        decoder = bind(model, policy)
        _, prompts, _ = decoder.prefill(tokens, mask)
        state = DecoderState.of(prompts, 2, 3, unroll=True)
        decoder = decoder.unrolled()
        hiddens = []
        for step in range(2):
            seen = jnp.concatenate([jnp.repeat(mask, 2, axis=0), jnp.arange(3) <= step + jnp.zeros((8, 1))], axis=1)
            positions = seen.sum(1) - 1
            hidden, state, _ = decoder.decode(following[step], positions, state, seen, jnp.int32(5 + step))
            hiddens.append(hidden)
        return hiddens, state.stacks

    with jax.set_mesh(mesh):
        return jax.device_get(run(policy))


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_decode_steps_equal_the_form_of_the_compiler(request, name):
    expected = decoded("compiler", name)
    request.getfixturevalue("fused")
    chex.assert_trees_all_close(decoded("kernels", name), expected, atol=2e-4, rtol=2e-4)


def test_fused_decode_steps_are_equal_on_a_mesh(fused):
    chex.assert_trees_all_close(decoded("kernels", mesh="tensor"), decoded("kernels"), atol=2e-4, rtol=2e-4)


def test_fused_gradients_are_no_farther_from_float32(request):
    def error(form):
        pairs = zip(jax.tree.leaves(computed(form, dtype="bfloat16")), jax.tree.leaves(exact), strict=True)
        sizes = [(np.linalg.norm(got - expected), np.linalg.norm(expected)) for got, expected in pairs]
        return np.mean([distance / size for distance, size in sizes if size])

    exact = computed("compiler")
    before = error("compiler")
    request.getfixturevalue("fused")
    assert 0 < error("kernels") <= before


def test_gpus_fuse_in_bfloat16_and_cpus_never(monkeypatch):
    assert not heads.can_fuse(128, jnp.bfloat16)
    assert not norms.can_fuse(jnp.bfloat16)
    monkeypatch.setattr(sharding, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    assert heads.can_fuse(128, jnp.bfloat16)
    assert not heads.can_fuse(96, jnp.bfloat16)
    assert not heads.can_fuse(128, jnp.float32)
    assert norms.can_fuse(jnp.bfloat16)
    assert not norms.can_fuse(jnp.float32)


def test_xla_attention_leaves_all_kernels_out(fused):
    tokens = jnp.zeros((2, PROMPT + LENGTH), jnp.int32)
    mask = jnp.ones(tokens.shape, bool)
    forest = row_forest(mask, jnp.full(2, PROMPT), LENGTH)
    mesh = make_mesh()

    def program(attention):
        model = Decoder(dataclasses.replace(CONFIGS["adapter"], attention=attention))

        def run(policy):
            spans = forest.spans(CONFIGS["adapter"].sliding_window)
            return bind(model, policy).run(forest.take(tokens), forest.take(mask), forest.depth, spans)[0].sum()

        with jax.set_mesh(mesh):
            return str(jax.make_jaxpr(jax.grad(run, allow_int=True))(policy_of("adapter", mesh)))

    assert "pallas_call" in program("auto")
    assert "pallas_call" not in program("xla")
