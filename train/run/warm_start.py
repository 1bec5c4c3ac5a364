"""The supervised warm start on the solutions of the task; its result is the base of the run."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import kljax
from train.config.errors import GuardError
from train.config.schema import Config
from train.context import RunContext
from train.data.prompts import Supervised
from train.distributed.global_arrays import held_rows
from train.models import Decoder
from train.models.shard_rows import shard_rows
from train.models.sharding import batch_sharding, replicated
from train.rl import objective as objectives
from train.rl.optimizer import chain_optimizer
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.rl.state import init_optimizer_state, keep_unless
from train.rl.tracing import traced_once
from train.run.guard import nonfinite_array
from train.sequences.batch import Batch

Tree = Any
Report = Callable[[int, dict[str, float]], None]


def supervised_loss(config: Config, model: Decoder, params: Tree, batch: Batch) -> tuple[jax.Array, kljax.WeightedSum]:
    """Computes the mean negative log-prob of the solutions' tokens, at the sampling temperature."""
    tokens, token_mask, mask = map(jnp.asarray, (batch.tokens, batch.token_mask, batch.completion_mask))
    sequences = Sequences.rows(tokens, token_mask, mask)
    scored = ScoredPolicy(model, kljax.Policy(params))
    stats, _ = token_stats(scored, sequences, temperature=config.temperature, tile=objectives.tile(config.log_probs))
    loss = -kljax.aggregate(stats.log_prob, batch.completion_mask, mode="token_mean")
    return loss, kljax.WeightedSum.of(-stats.log_prob, batch.completion_mask)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Makes the optimizer of the config with a cosine schedule and a short warm-up."""
    section = config.warm_start
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        section.learning_rate,
        # At least one step, and one left for the decay.
        min(max(1, section.steps // 20), section.steps - 1),
        section.steps,
        section.learning_rate / 100,
    )
    return chain_optimizer(config.optim, rate)


def make_step(
    config: Config, model: Decoder, optimizer: optax.GradientTransformation, start: tuple[Tree, Tree], mesh: Mesh
) -> Callable[[Tree, Tree, Batch], tuple[Tree, Tree, kljax.WeightedSum]]:
    """Compiles `(params, opt_state, batch) -> (params, opt_state, loss)`; the first two are donated.

    A step whose loss or gradient is not finite is skipped, and its loss is NaN. So is one whose gradient is 0: numbers
    that overflow in a norm leave hidden states of 0, so that no output depends on the weights any more.
    """

    def step(params: Tree, opt_state: Tree, batch: Batch) -> tuple[Tree, Tree, kljax.WeightedSum]:
        gradient = jax.grad(lambda p: supervised_loss(config, model, p, batch), has_aux=True)
        grads, loss = gradient(params)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss.value()) & jnp.isfinite(norm) & (norm > 0)
        changes, next_opt_state = optimizer.update(grads, opt_state, params)
        trained = optax.apply_updates(params, changes), next_opt_state
        loss = jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan), loss)
        return *keep_unless(finite, trained, (params, opt_state)), loss

    shardings = jax.tree.map(lambda x: x.sharding, start)
    return jax.jit(traced_once(step), donate_argnums=(0, 1), out_shardings=(*shardings, replicated(mesh)))


def warm_start(context: RunContext, params: Tree, data: Supervised, report: Report) -> Tree:
    """Trains the weights for `config.warm_start.steps` steps, and calls `report(step, metrics)` after each.

    The metrics of step i are read while step i + 1 runs, so the host does not wait for the device.

    Raises:
      GuardError: loss or gradient are not finite for `guard.max_skipped` steps in a row, or with the last weights.
    """
    config = context.config
    model = context.model
    mesh = context.mesh
    section = config.warm_start
    if section.steps == 0:
        return params
    optimizer = make_optimizer(config)
    opt_state = init_optimizer_state(optimizer, params, replicated(mesh))
    # The step donates its weights, so the first ones are copied.
    params = jax.tree.map(jnp.copy, params)
    compiled = make_step(config, model, optimizer, (params, opt_state), mesh)
    pending: list[kljax.WeightedSum] = []
    skipped = 0

    def read(number: int) -> None:
        nonlocal skipped
        loss = float(pending.pop(0).value())
        report(number, {"loss": loss})
        skipped = 0 if math.isfinite(loss) else skipped + 1
        if skipped == config.guard.max_skipped:
            first = nonfinite_array(params) or "the loss or its gradient"
            text = f"{skipped} steps in a row were skipped; {first} is not finite"
            raise GuardError(f"guard.max_skipped: warm start, step {number}: {text}. Nothing was saved")

    local_rows = held_rows(batch_sharding(mesh), section.batch_size)
    for number in range(section.steps):
        params, opt_state, loss = compiled(params, opt_state, shard_rows(data.batch(number, local_rows), mesh))
        pending.append(loss)
        if number > 0:
            read(number)
    read(section.steps)
    # No step has read the last weights yet; a further one, whose result is dropped, does.
    batch = shard_rows(data.batch(section.steps - 1, local_rows), mesh)
    _, _, loss = compiled(jax.tree.map(jnp.copy, params), opt_state, batch)
    if not math.isfinite(float(loss.value())):
        first = nonfinite_array(params)
        problem = f"{first} is not finite" if first else "their loss is not finite, or its gradient not finite or 0"
        raise GuardError(f"warm start: the weights after its last step cannot be used: {problem}. Nothing was saved")
    return params
