"""The supervised warm start: imitate the solutions for a while; the result is the base and the first reference."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import kljax
from train.config.schema import Config
from train.data import Supervised, SupervisedBatch
from train.models import Decoder
from train.policy import token_stats
from train.setting import Setting
from train.sharding import replicated, shard_rows
from train.tracing import traced_once

Tree = Any
Report = Callable[[int, dict[str, float]], None]


def supervised_loss(
    config: Config, model: Decoder, params: Tree, batch: SupervisedBatch
) -> tuple[jax.Array, kljax.WeightedSum]:
    """Mean negative log-prob over the tokens of the solutions, at the temperature that will be sampled at."""
    stats, _ = token_stats(
        model,
        kljax.Policy(params),
        jnp.asarray(batch.tokens),
        jnp.asarray(batch.token_mask),
        temperature=config.temperature,
        first=config.data.max_prompt_length,
    )
    loss = -kljax.aggregate(stats.log_prob, batch.completion_mask, mode="token_mean")
    return loss, kljax.WeightedSum.of(-stats.log_prob, batch.completion_mask)


def warm_start(setting: Setting, params: Tree, data: Supervised, report: Report) -> Tree:
    """Trains the weights for `config.warm_start.steps` steps; `report(step, metrics)` is called after each.

    AdamW under a cosine schedule with a short warm-up. The metrics of step i are read while step i + 1 runs, so the
    host does not wait for the device.
    """
    config, model, mesh = setting.config, setting.model, setting.mesh
    section = config.warm_start
    if section.steps == 0:
        return params
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.optim.max_grad_norm),
        optax.adamw(
            optax.warmup_cosine_decay_schedule(
                0.0,
                section.learning_rate,
                # At least one step, but never the only one: the decay needs one too.
                min(max(1, section.steps // 20), section.steps - 1),
                section.steps,
                section.learning_rate / 100,
            ),
            b2=config.optim.b2,
            weight_decay=config.optim.weight_decay,
        ),
    )

    def step(params: Tree, opt_state: Tree, batch: SupervisedBatch) -> tuple[Tree, Tree, kljax.WeightedSum]:
        gradient = jax.grad(lambda p: supervised_loss(config, model, p, batch), has_aux=True)
        grads, loss = gradient(params)
        changes, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, loss

    opt_state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, replicated(mesh)), optimizer.init(params))
    shardings = jax.tree.map(lambda x: x.sharding, (params, opt_state))
    # The first weights are copied because their buffers are given away to the step.
    params = jax.tree.map(jnp.copy, params)
    compiled = jax.jit(traced_once(step), donate_argnums=(0, 1), out_shardings=(*shardings, replicated(mesh)))
    pending: kljax.WeightedSum | None = None
    for number in range(section.steps):
        params, opt_state, loss = compiled(params, opt_state, shard_rows(data.batch(number), mesh))
        if pending is not None:
            report(number, {"loss": float(pending.value())})
        pending = loss
    report(section.steps, {"loss": float(pending.value()) if pending is not None else 0.0})
    return params
