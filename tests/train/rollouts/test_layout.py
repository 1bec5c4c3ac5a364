"""Sampling on a mesh of its own: the tokens of one device, weights that move in parts, no gather in a decode step."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import near_ties, rounding, tiny
from tests.train.rollouts.census import weight_collectives
from train.context import RunContext
from train.data.tasks import load_task
from train.distributed.compile_cache import compiled_anew
from train.models import Decoder, DecoderConfig, LoraConfig
from train.models.head import head
from train.models.parameters import abstract_params
from train.models.sharding import make_mesh, reshape_mesh
from train.plan.compiler import hlo
from train.rl.policy import ScoredPolicy, Sequences, hidden_states
from train.rollouts.jax_source import begin_samples, make_sampler, sampling_program
from train.rollouts.layout import SamplingLayout
from train.rollouts.sampler import Samples, Sampling
from train.rollouts.sampler.draw import CHUNK

SHAPE = "model={layers: 2, width: 16, heads: 8, kv_heads: 8, head_dim: 4, mlp_width: 40}"
LENGTH = 6
OPTIONS = (SHAPE, f"data.max_completion_length={LENGTH}", "eval.batch_size=8", "warm_start.batch_size=8")
LORA = "lora={rank: 2, alpha: 8, targets: [q_proj, v_proj, down_proj]}"

# The longest sums are those of the MLP.
BOUND = rounding.of_decoder(layers=2, longest_sum=40)


def context_on(shape: tuple[int, int, int], *overrides: str) -> RunContext:
    mesh = "mesh={{data: {}, fsdp: {}, tensor: {}}}".format(*shape)
    return tiny.context_of(tiny.config_of(*OPTIONS, mesh, *overrides), mesh=make_mesh(*shape))


@functools.cache
def drawn(model: Decoder) -> kljax.Policy:
    """Weights large enough for tokens that depend on them; with lora, an adapter that acts."""
    adapter, params = None, tiny.drawn(model, jax.random.key(0))
    with jax.set_mesh(tiny.mesh_of()):
        if model.config.lora is not None:
            adapter = jax.tree.map(lambda x: x + 0.3, tiny.drawn(model, jax.random.key(3), adapter=True))
        return kljax.Policy(jax.tree.map(lambda x: x * (4 if x.ndim > 2 else 1), params), adapter)


def policy_on(context: RunContext) -> kljax.Policy:
    """The same weights on every mesh."""
    return tiny.placed(drawn(context.model), context.model, context.mesh)


def sampled(context: RunContext, policy: kljax.Policy | None = None) -> Samples:
    examples = load_task(context.config).train[:8]
    with jax.set_mesh(context.mesh):
        sampler = make_sampler(context, "held_out")
        policy = policy_on(context) if policy is None else policy
        return begin_samples(context, sampler, policy, examples, jax.random.key(1))


@functools.cache
def on_one_device(*overrides: str) -> Samples:
    return sampled(context_on((1, 1, 1), *overrides))


def probs_of_one_device(row: int, column: int, *overrides: str) -> np.ndarray:
    """The distribution that a token of `on_one_device` was drawn from."""
    context, samples = context_on((1, 1, 1), *overrides), on_one_device(*overrides)
    with jax.set_mesh(context.mesh):
        policy, tokens, mask = policy_on(context), samples.tokens[:, :column], samples.token_mask[:, :column]
        hidden = hidden_states(ScoredPolicy(context.model, policy), Sequences.rows(tokens, mask))[row, -1]
        logits = hidden @ head(context.model, policy.params) / context.config.temperature
    return np.asarray(jax.nn.softmax(logits))


def sampling_mesh(data: int, tensor: int) -> str:
    return f"rollout.mesh={{data: {data}, tensor: {tensor}}}"


REFILLED = (LORA, "rollout.slots=4")


@pytest.mark.parametrize(
    ("training", "sampling", "overrides"),
    [
        ((2, 2, 2), (2, 4), REFILLED),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ((1, 4, 2), (4, 2), REFILLED),
                ((2, 2, 2), (2, 4), ()),
                ((1, 4, 2), (4, 2), ()),
                ((1, 4, 2), (2, 4), ()),
                ((2, 4, 1), (4, 2), ()),
                ((1, 2, 4), (8, 1), ()),
                ((2, 1, 4), (4, 2), ()),
            )
        ),
    ],
    ids=str,
)
def test_tokens_equal_one_device(training, sampling, overrides):
    """With an adapter and refilled slots, and without."""
    expected, context = on_one_device(*overrides), context_on(training, sampling_mesh(*sampling), *overrides)
    samples = sampled(context)
    assert not context.layout.in_place
    assert dict(context.layout.mesh.shape) == {
        "data": sampling[0],
        "fsdp": 1,
        "expert": 1,
        "context": 1,
        "tensor": sampling[1],
    }
    near_ties.assert_same_samples(
        *(samples, expected),
        key=jax.random.key(1),
        probs_at=lambda row, column: probs_of_one_device(row, column, *overrides),
        roundings=BOUND,
    )
    # Some 50 tokens are drawn, and fewer than one in a thousand is a near tie.
    same = near_ties.first_difference(samples.tokens, expected.tokens) == samples.tokens.shape[1]
    assert same.sum() >= len(same) - 2
    # The update gets rows as its own mesh splits them.
    assert samples.tokens.sharding.mesh.shape == context.mesh.shape
    assert samples.tokens.sharding.spec[0] == ("data", "fsdp", "expert")


def test_sampled_token_beyond_a_near_tie_fails():
    """Each row in turn with another token; the distribution and the random numbers are those of the draw."""
    samples = on_one_device()
    compare = functools.partial(
        near_ties.assert_same_samples,
        expected=samples,
        key=jax.random.key(1),
        probs_at=probs_of_one_device,
        roundings=BOUND,
    )
    compare(samples)
    for row in (0, 3):
        tokens = np.array(samples.tokens)
        column = int(samples.prompt_lengths[row])
        tokens[row, column] = (tokens[row, column] + 1) % 256
        with pytest.raises(AssertionError, match=f"row {row}, token {column}: .* no near tie"):
            compare(dataclasses.replace(samples, tokens=tokens))
    planted = rounding.planted(samples.fields["rollout_log_probs"], roundings=10 * BOUND)
    with pytest.raises(AssertionError, match="roundings of the norm"):
        compare(dataclasses.replace(samples, fields={"rollout_log_probs": planted}))


def test_token_at_the_bound_is_a_near_tie():
    """The distribution of the first token, with the random number moved onto its border to the next."""
    samples = on_one_device()
    column = int(samples.prompt_lengths[0])
    probs = probs_of_one_device(0, column)[:CHUNK].astype(np.float64)
    borders = np.cumsum(probs) / probs.sum()
    token = int(np.argmax(probs[:-1] + probs[1:]))
    at = np.array([0.0, borders[token]], np.float32)
    for tokens, border, expected in (
        ((token, token + 1), near_ties.BORDER, True),
        ((token, token + 1), 1e-9, False),
        ((token, token + 2), near_ties.BORDER, False),
    ):
        assert near_ties.is_near_tie(probs.astype(np.float32), at + np.float32([0, 5e-6]), tokens, border) == expected


def test_rounded_copy_gives_the_bits_of_weights():
    """The decoder rounds weights to bfloat16 before it uses them, so that a rounded copy changes no bit."""
    wide = context_on((1, 1, 1), "model.dtype=bfloat16")
    narrow = dataclasses.replace(wide)
    narrow.__dict__["layout"] = layout = SamplingLayout(wide.mesh, wide.mesh, wide.model)
    policy = policy_on(wide)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(layout.weights(policy).params["layers"]["mlp"])}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}
    assert not layout.in_place
    assert wide.layout.in_place
    expected, samples = sampled(wide, policy), sampled(narrow, policy)
    np.testing.assert_array_equal(samples.tokens, expected.tokens)
    np.testing.assert_array_equal(samples.fields["rollout_log_probs"], expected.fields["rollout_log_probs"])


def test_sampler_dtype_rounds_the_head_too():
    context = context_on((1, 1, 1), "rollout.dtype=bfloat16")
    policy = policy_on(context)
    weights = context.layout.weights(policy).params
    assert weights["embed_tokens"]["embedding"].dtype == jnp.bfloat16
    assert weights["norm"]["scale"].dtype == jnp.float32
    assert policy.params["embed_tokens"]["embedding"].dtype == jnp.float32
    assert context.layout.model.config.dtype == "bfloat16"


def test_weights_are_laid_out_once_until_they_change():
    context = context_on((1, 4, 2), LORA, sampling_mesh(4, 2))
    policy, layout = policy_on(context), context.layout
    first = layout.weights(policy)
    assert layout.weights(policy) == first
    layout.release()
    changed = kljax.Policy(policy.params, jax.tree.map(lambda x: x + 1, policy.adapter))
    second = layout.weights(changed)
    # The base is frozen: laid out once in a run.
    assert second.params is first.params
    np.testing.assert_array_equal(*(jax.tree.leaves(item.adapter)[0] for item in (second, changed)))
    moved = kljax.Policy(jax.tree.map(lambda x: x + 1, policy.params), policy.adapter)
    np.testing.assert_array_equal(*(jax.tree.leaves(item.params)[0] for item in (layout.weights(moved), moved)))


def test_all_weights_are_freed_before_the_update():
    context = context_on((1, 4, 2), sampling_mesh(4, 2))
    policy, layout = policy_on(context), context.layout
    first = layout.weights(policy).params
    assert layout.weights(policy).params is first
    layout.release()
    assert layout.weights(policy).params is not first


TREE = DecoderConfig(
    vocab_size=64, layers=2, width=32, heads=8, kv_heads=8, head_dim=4, mlp_width=40, qkv_bias=True,
    lora=LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "down_proj")), dtype="bfloat16",
)  # fmt: skip


def largest_array(text: str) -> int:
    """Number of values of the largest array in a program."""
    shapes = re.findall(r"[a-z]\w*\[([\d,]*)\]", text)
    return max(math.prod(int(size) for size in shape.split(",") if size) for shape in shapes)


@pytest.mark.parametrize(
    ("training", "tensor"),
    [
        ((2, 4, 1), 2),
        ((1, 4, 2), 8),
        ((1, 2, 4), 2),
        pytest.param((2, 2, 2), 4, marks=pytest.mark.thorough),
        pytest.param((1, 4, 2), 2, marks=pytest.mark.thorough),
    ],
)
def test_no_moving_leaf_exceeds_its_destination(training, tensor):
    mesh, model = make_mesh(*training), Decoder(TREE)
    layout = SamplingLayout(mesh, reshape_mesh(mesh, 8 // tensor, tensor), model)
    with compiled_anew():
        compiled = layout.program("params").lower(abstract_params(model, mesh)).compile()
    params = tiny.placed(drawn(model), model, mesh).params
    result = compiled(params)
    parts = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(result)]
    assert largest_array(compiled.as_text()) == max(parts)
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new, old.astype(new.dtype)), result, params)


def decode_program(context: RunContext) -> str:
    """The text of the compiled program of a sampler."""
    # A number of rows that is no size of a weight.
    layout, prompts = context.layout, jnp.zeros((12, tiny.PROMPT), jnp.int32)
    weights = layout.weights(policy_on(context))
    program = sampling_program(context, "census", 2, sampling=Sampling(), stop=None)
    with layout.active(), compiled_anew():
        return program.lower(weights, prompts, prompts >= 0, jax.random.key(0)).compile().as_text()


@pytest.mark.parametrize(
    ("slots", "tensor"), [("null", 2), pytest.param("null", 4, marks=pytest.mark.thorough), ("4", 2)]
)
def test_no_collective_of_the_sampler_moves_a_weight(slots, tensor):
    context = context_on((1, 4, 2), f"rollout.slots={slots}", sampling_mesh(8 // tensor, tensor))
    params = context.model.structure().params
    assert weight_collectives(hlo.parse(decode_program(context)), params, context.mesh) == []


def test_weights_in_place_are_gathered_per_decode_step():
    """The control of the test above."""
    context = context_on((1, 4, 2))
    with jax.set_mesh(context.mesh):
        text = decode_program(context)
    operations = weight_collectives(hlo.parse(text), context.model.structure().params, context.mesh)
    # Seven projections in the prefill, seven of each of the two layers and the embedding in the loop.
    assert len(operations) >= 7 + 2 * 7 + 1
    assert {entry.partition(" ")[0] for entry in operations} == {"all-gather"}
