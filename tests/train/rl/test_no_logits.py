"""No compiled program of the trainer holds logits of all its tokens, on one device or on a mesh."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.config.plan import Plan
from train.config.schema import Config
from train.models import Decoder
from train.models.sharding import batch_sharding
from train.rl import policy, step
from train.rl.objective import coefficients
from train.rl.optimizer import make_optimizer
from train.rl.policy import ScoredPolicy
from train.rl.reference import reference_head
from train.rollouts.jax_source import sampling_program
from train.rollouts.sampler import Sampling
from train.run import warm_start
from train.run.setup import first_state
from train.sequences.batch import Batch

# Numbers that nothing else has; tokens outnumber the width, so that no weight is as large as the logits would be.
VOCABULARY, COMPLETION = 278, 37
LENGTH = tiny.PROMPT + COMPLETION
OPTIONS = (
    f"data.max_completion_length={COMPLETION}",
    "log_probs={tile: {tokens: 8, vocab: 64}, token_chunk: 8}",
    "optim.micro_batches=2",
    "rollout.samples_per_prompt=4",
)
ROWS = 16
KINDS = {
    "full": ("kl.loss.coef=0.1", "loss.entropy_coef=0.1"),
    "lora": ("kl.loss.coef=0.1", "loss.entropy_coef=0.1", "lora={rank: 2, alpha: 4.0}", "model.tie_embeddings=false"),
    "exact": (
        *("kl.loss={coef: 0.1, estimator: exact}", "kl.reward={coef: 0.1, estimator: exact}"),
        *("reference.monitor=true", "loss.entropy_coef=0.1"),
    ),
}
ONE_DEVICE, EIGHT_DEVICES = (1, 1, 1), (2, 2, 2)
MESHES = (EIGHT_DEVICES, pytest.param(ONE_DEVICE, marks=pytest.mark.thorough))
# Every term once with all weights on the mesh, and with an adapter on one device, which compiles in less time.
PAIRS = (("exact", EIGHT_DEVICES), ("lora", ONE_DEVICE))
OTHERS = (("full", EIGHT_DEVICES), ("full", ONE_DEVICE), ("exact", ONE_DEVICE), ("lora", EIGHT_DEVICES))
SHAPE = re.compile(r"\b(?:pred|[a-z]+[0-9]+)\[([0-9,]+)\]")


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The optimised program, whose code needs not be fast."""
    return lowered.compile({"xla_backend_optimization_level": 0})


def largest(program: jax.stages.Compiled) -> int:
    """Elements of the largest array of a program, on one device; fused ones count too."""
    actual = (math.prod(map(int, dims.split(","))) for dims in SHAPE.findall(program.as_text()))
    return max(actual)


def logits(mesh: jax.sharding.Mesh, rows: int) -> int:
    """Elements of the logits of so many rows, on one device."""
    return rows // mesh.shape["data"] // mesh.shape["fsdp"] * COMPLETION * VOCABULARY // mesh.shape["tensor"]


def rollout_batch(mesh: jax.sharding.Mesh) -> Batch:
    column = np.arange(LENGTH)
    mask = np.broadcast_to(column >= tiny.PROMPT, (ROWS, LENGTH))
    batch = Batch(
        tokens=jnp.zeros((ROWS, LENGTH), jnp.int32),
        token_mask=jnp.asarray(np.ones_like(mask)),
        completion_mask=jnp.asarray(mask),
        rewards=jnp.zeros(ROWS),
        group_ids=jnp.asarray(np.repeat(np.arange(4), 4), jnp.int32),
        rollout_log_probs=jnp.zeros((ROWS, LENGTH)),
    )
    return jax.device_put(batch, batch_sharding(mesh))


def setting(kind: str, mesh: jax.sharding.Mesh) -> tuple[Config, Decoder, dict]:
    shape = "{{data: {data}, fsdp: {fsdp}, tensor: {tensor}}}".format(**mesh.shape)
    heads = "model={layers: 3, width: 16, heads: 2, kv_heads: 2, head_dim: 8, mlp_width: 24}"
    config = tiny.config_of(heads, *OPTIONS, *KINDS[kind], f"mesh={shape}")
    model = tiny.model_of(config)
    model = Decoder(dataclasses.replace(model.config, vocab_size=VOCABULARY))
    # No program runs.
    weights = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), model.structure().params)
    return config, model, tiny.placed(kljax.Policy(weights), model, mesh).params


def rl_programs(kind: str, mesh: jax.sharding.Mesh) -> dict[str, jax.stages.Compiled]:
    """Scoring and update."""
    config, model, params = setting(kind, mesh)
    optimizer = make_optimizer(config.optim)
    state = first_state(Plan.of(config), model, mesh, params, optimizer)
    base = params if config.lora is not None else None
    reference, batch = ScoredPolicy(model, kljax.Policy(params)), rollout_batch(mesh)
    score = step.make_score(Plan.of(config), model, mesh).lower(state.trainable, base, reference, batch)
    scored = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh)), score.out_info
    )
    full = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.float32, sharding=batch_sharding(mesh))
    update = step.make_update(Plan.of(config), model, optimizer, state, mesh).lower(
        state,
        base,
        dataclasses.replace(scored, advantages=full),
        jnp.arange(ROWS),
        coefficients(config),
        ref_head=reference_head(Plan.of(config), reference),
    )
    return {"score": compiled(score), "update": compiled(update)}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in OTHERS)],
    ids=str,
)
def test_scoring_and_updates_hold_no_logits(kind, shape):
    mesh = tiny.mesh_of(*shape)
    with jax.set_mesh(mesh):
        sizes = {name: largest(program) for name, program in rl_programs(kind, mesh).items()}
    assert max(sizes.values()) < logits(mesh, ROWS // 2), sizes


@pytest.mark.parametrize("shape", [ONE_DEVICE, pytest.param(EIGHT_DEVICES, marks=pytest.mark.thorough)], ids=str)
def test_check_finds_logits_where_they_exist(shape, monkeypatch):
    lm_head = policy._lm_head
    building = lambda *arguments: dataclasses.replace(lm_head(*arguments), implementation="reference")  # noqa: E731
    monkeypatch.setattr(policy, "_lm_head", building)
    mesh = tiny.mesh_of(*shape)
    with jax.set_mesh(mesh):
        sizes = {name: largest(program) for name, program in rl_programs("exact", mesh).items()}
    assert min(sizes.values()) >= logits(mesh, ROWS // 2), sizes


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_warm_start_and_samplers_hold_no_logits(shape):
    mesh = tiny.mesh_of(*shape)
    with jax.set_mesh(mesh):
        config, model, params = setting("full", mesh)
        optimizer = warm_start.make_optimizer(config)
        start = (params, optimizer.init(params))
        mask = np.broadcast_to(np.arange(LENGTH) >= tiny.PROMPT, (ROWS, LENGTH))
        batch = Batch(np.zeros((ROWS, LENGTH), np.int32), np.ones_like(mask), mask)
        batch = jax.device_put(batch, batch_sharding(mesh))
        imitate = compiled(warm_start.make_step(config, model, optimizer, start, mesh).lower(*start, batch))
        assert largest(imitate) < logits(mesh, ROWS)
        # Those of one decode step are what a token is drawn from.
        built = tiny.context_of(config, model=model, mesh=mesh)
        sampler = sampling_program(built, "held_out", 1, sampling=Sampling(), stop=None)
        prompts = jax.device_put(batch.tokens[:, : tiny.PROMPT], batch_sharding(mesh))
        drawn = compiled(sampler.lower(kljax.Policy(params), prompts, prompts > -1, jax.random.key(0)))
        assert largest(drawn) < logits(mesh, ROWS)
