"""Projections of one input in one product with their adapters, forced on a CPU, which runs them one by one."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

import kljax
from train.models import Decoder, DecoderConfig, LoraConfig, projections
from train.models.cache import DecoderState
from train.models.config import PROJECTIONS
from train.models.layers import InitKey, Linear
from train.models.parameters import bind, init_adapter, init_params
from train.models.projections import project
from train.models.sharding import make_mesh

LORA = LoraConfig(rank=3, alpha=12.0, targets=PROJECTIONS)
CONFIG = DecoderConfig(
    vocab_size=24, layers=3, width=64, heads=4, kv_heads=2, head_dim=16, mlp_width=96, dtype="bfloat16", qk_norm=True,
    lora=dataclasses.replace(LORA, rank=8, alpha=16.0),
)  # fmt: skip
# Data, fsdp and tensor, and context.
MESHES = {"one device": ((1, 1, 1), 1), "fsdp": ((1, 4, 1), 1), "tensor": ((1, 2, 2), 1), "context": ((1, 2, 1), 2)}
# Outputs and whether there is an adapter of every projection of an input of 16, and whether they have biases.
GROUPS = {
    "three": ([(16, True), (8, True), (8, True)], False),
    "two of three": ([(16, True), (8, False), (8, True)], False),
    "biases": ([(24, True), (24, True)], True),
    "narrow": ([(12, True)], False),
    "wide": ([(24, True)], True),
}


@pytest.fixture
def joined(monkeypatch):
    """Lets every projection with an adapter join, on CPUs, in any type and for any number of tokens."""

    def can_join(linears, dtype):
        return any(linear.lora_scale is not None for linear in linears)

    monkeypatch.setattr(projections, "can_join", can_join)
    monkeypatch.setattr(projections, "joins", lambda x, linears: can_join(linears, x.dtype))


def drawn(outputs, *, bias, dtype="float32"):
    """Projections whose weights are all random."""
    keys = map(jax.random.key, range(100))
    linears = []
    for size, adapted in outputs:
        lora = LORA if adapted else None
        axes = ("embed", "mlp") if len(outputs) > 1 else ("mlp", "embed")
        linear = Linear(16, size, axes, key=InitKey(next(keys)), bias=bias, lora=lora, param_dtype=dtype)
        linears.append(jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype) / 3, linear))
    return linears


def values_and_gradients(run, x, linears):
    """The outputs of projections, and the gradients of a weighted sum of them to the input and to all weights."""

    def loss(x, linears):
        ys = run(x, *linears)
        weights = (jax.random.normal(jax.random.key(place), y.shape) for place, y in enumerate(ys))
        return sum(jnp.sum(weight * y.astype(jnp.float32)) for weight, y in zip(weights, ys, strict=True)), ys

    (_, ys), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, linears)
    return ys, gradients


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("group", GROUPS)
def test_joined_projections_equal_separate_ones(joined, group, mesh):
    linears, x = drawn(GROUPS[group][0], bias=GROUPS[group][1]), jax.random.normal(jax.random.key(7), (4, 6, 16))
    expected = values_and_gradients(lambda x, *linears: [linear(x) for linear in linears], x, linears)
    sizes, context = MESHES[mesh]
    with jax.set_mesh(make_mesh(*sizes, context=context)):
        actual = values_and_gradients(project, x, linears)
        program = str(jax.make_jaxpr(project)(x, *linears))
    chex.assert_trees_all_close(jax.tree.leaves(actual), jax.tree.leaves(expected), atol=2e-5, rtol=2e-5)
    assert "custom_vjp" in program


@pytest.mark.parametrize("group", GROUPS)
def test_adapter_gradients_are_summed_and_kept_in_float32(joined, group):
    linears = drawn(GROUPS[group][0], bias=GROUPS[group][1], dtype="bfloat16")
    x = jax.random.normal(jax.random.key(7), (8, 128, 16), jnp.bfloat16)
    _, (dx, dlinears) = values_and_gradients(project, x, linears)
    assert dx.dtype == jnp.bfloat16
    for gradient in jax.tree.leaves(nnx.state(dlinears, nnx.LoRAParam)):
        assert gradient.dtype == jnp.float32
        assert jnp.any(gradient != gradient.astype(jnp.bfloat16).astype(jnp.float32))


def sums_of_tokens(jaxpr, tokens):
    """The types of the products that sum over an axis of so many tokens, inner programs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (axes, _), _ = equation.params["dimension_numbers"]
            if tokens in [equation.invars[0].aval.shape[axis] for axis in axes]:
                yield equation.outvars[0].aval.dtype
        for inner in jaxprs_in_params(equation.params):
            yield from sums_of_tokens(inner, tokens)


def test_all_sums_over_tokens_are_in_float32(joined):
    linears, x = drawn(GROUPS["three"][0], bias=False, dtype="bfloat16"), jnp.ones((1000, 16), jnp.bfloat16)
    program = jax.make_jaxpr(functools.partial(values_and_gradients, project))(x, linears)
    assert set(sums_of_tokens(program.jaxpr, 1000)) == {jnp.dtype("float32")}


@functools.cache
def policy_of(sizes, context):
    """A decoder's policy on a mesh, with weights that bfloat16 has exactly and an adapter of which no half is 0."""
    mesh = make_mesh(*sizes, context=context)
    params = init_params(Decoder(CONFIG), jax.random.key(0), mesh)
    adapter = init_adapter(Decoder(CONFIG), jax.random.key(1), mesh)
    keys = map(jax.random.key, range(100))
    adapter = jax.tree.map(lambda x: x if x.any() else 0.1 * jax.random.normal(next(keys), x.shape), adapter)
    return mesh, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params), adapter


def adapter_gradients(dtype, mesh):
    """Gradients of sums of all hidden states to an adapter, a draw each; half of the rows have padding on the left."""
    mesh, params, adapter = policy_of(*MESHES[mesh])
    model = Decoder(dataclasses.replace(CONFIG, dtype=dtype))
    mask = jnp.arange(24) >= jnp.array([[0], [5]] * 4)

    def loss(adapter, params, key):
        of_tokens, of_weights = jax.random.split(key)
        tokens = jax.random.randint(of_tokens, (8, 24), 0, 24)
        weights = jax.random.normal(of_weights, (8, 24, 64)) * mask[..., None]
        hidden = bind(model, kljax.Policy(params, adapter))(tokens, mask)
        return jnp.sum(jnp.where(mask[..., None], hidden.astype(jnp.float32), 0) * weights)

    with jax.set_mesh(mesh):
        # Without the roundings that the compiler of CPUs leaves out in some of the sums over devices.
        gradient = jax.jit(jax.grad(loss), compiler_options={"xla_allow_excess_precision": False})
        return [jax.tree.leaves(jax.device_get(gradient(adapter, params, jax.random.key(draw)))) for draw in range(32)]


@pytest.mark.parametrize("mesh", MESHES)
def test_joined_gradients_are_no_farther_from_float32(joined, monkeypatch, mesh):
    """In the mean over draws, whose standard error is 1 %; in one draw either form may be 10 % closer."""

    def error(draws):
        pairs = [pair for both in zip(draws, exact, strict=True) for pair in zip(*both, strict=True)]
        return np.mean([np.linalg.norm(got - expected) / np.linalg.norm(expected) for got, expected in pairs])

    close = adapter_gradients("bfloat16", mesh)
    monkeypatch.undo()
    exact = adapter_gradients("float32", mesh)
    assert 0 < error(close) <= 1.02 * error(adapter_gradients("bfloat16", mesh))


def test_accelerators_join_in_bfloat16_and_cpus_never(monkeypatch):
    linears = drawn([(32, True), (8, False)], bias=False)
    plain, int8 = (Linear(16, 8, ("embed", "mlp"), key=InitKey(jax.random.key(0)), lora=lora, quantization=quantization)
                   for lora, quantization in ((None, None), (LORA, "int8")))  # fmt: skip
    x = jnp.ones((4, 4, 16), jnp.bfloat16)
    assert not projections.joins(x, linears)
    for kind in ("NVIDIA H100 80GB HBM3", "TPU v5"):
        monkeypatch.setattr(projections, "device_kind", lambda kind=kind: kind)
        assert projections.joins(x, linears)
        assert not projections.joins(x[:, :3], linears), "fewer tokens than inputs"
        assert not projections.joins(x.astype(jnp.float32), linears)
        assert not projections.joins(x, [plain])
        assert not projections.joins(x, [int8])
        with jax.set_mesh(make_mesh(2)):
            assert not projections.joins(x, linears), "fewer tokens of a device than inputs"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_projections_keep_every_bit(dtype):
    linears, x = drawn(GROUPS["three"][0], bias=False), jax.random.normal(jax.random.key(7), (8, 8, 16), dtype)
    expected = values_and_gradients(lambda x, *linears: [linear(x) for linear in linears], x, linears)
    chex.assert_trees_all_equal(jax.tree.leaves(values_and_gradients(project, x, linears)), jax.tree.leaves(expected))


def joins_in_loops(jaxpr, *, inside=False):
    """The shapes of arrays that loops put together, without those that are stacked along a new axis."""
    for equation in jaxpr.eqns:
        if inside and equation.primitive.name == "concatenate":
            yield equation.outvars[0].aval.shape
        for inner in jaxprs_in_params(equation.params):
            yield from joins_in_loops(inner, inside=inside or equation.primitive.name == "while")


def test_decode_loop_reads_weights_that_are_joined_before_it(joined):
    _, params, adapter = policy_of((1, 1, 1), 1)
    model = Decoder(CONFIG)
    tokens, mask = jax.random.randint(jax.random.key(1), (2, 5), 0, 24), jnp.ones((2, 5), bool)
    _, prompts, _ = jax.jit(lambda p: bind(model, p).prefill(tokens, mask))(kljax.Policy(params, adapter))
    stacked = DecoderState.of(prompts, 1, 4)
    listed = dataclasses.replace(stacked, stacks=tuple(s.layers() for s in stacked.stacks), unrolled=True)
    seen = jnp.arange(9) < jnp.array([[6], [6]])

    def decode(policy, state, decoder_of):
        decoder = decoder_of(bind(model, policy))

        def step(carry):
            hidden, new, _ = decoder.decode(tokens[:, 0], jnp.array([5, 5]), carry[1], seen, jnp.int32(5))
            return carry[0] + 1, new, hidden

        first = (0, state, jnp.zeros((2, CONFIG.width), jnp.bfloat16))
        return jax.lax.while_loop(lambda carry: carry[0] < 1, step, first)[2]

    policy = kljax.Policy(params, adapter)
    before = jax.make_jaxpr(lambda p: decode(p, listed, lambda decoder: decoder.unrolled()))(policy)
    assert max(shape[0] for shape in joins_in_loops(before.jaxpr)) <= 2
    one, other = (
        jax.jit(functools.partial(decode, decoder_of=of))(policy, state)
        for of, state in ((lambda decoder: decoder.unrolled(), listed), (lambda decoder: decoder, stacked))
    )
    # Both join; several roundings of bfloat16 apart at most.
    np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), atol=0.05)
    merged = jax.tree.map(lambda x: x, adapter)
    merged["layers"]["mlp"]["down_proj"]["lora_B"] = 0 * merged["layers"]["mlp"]["down_proj"]["lora_B"]
    other = jax.jit(functools.partial(decode, decoder_of=lambda decoder: decoder.unrolled()))(
        kljax.Policy(params, merged), listed
    )
    assert jnp.max(jnp.abs(one - other)) > 0.1
