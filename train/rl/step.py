"""The compiled functions of an RL step: score a rollout batch, prepare it, update on it.

Each compiles once, which chex asserts, and none of them talks to the host.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import kljax
from train.config.schema import Config, Optim
from train.models import Decoder
from train.models.sharding import batch_sharding, replicated
from train.rl import objective as objectives
from train.rl.batch import Batch, map_micro_batches, micro_batches, row_count, take_rows
from train.rl.metrics import Metrics
from train.rl.policy import Reference as ExactReference
from train.rl.policy import paired_hidden_states, token_stats, token_values
from train.rl.reference import Reference, reference_head, restore_shared_base
from train.rl.state import TrainState, policy_of
from train.rl.tracing import traced_once

Tree = Any

SCORED = ("old_log_probs", "ref_log_probs", "ref_hidden", "ref_exact_kl", "values")
"""The fields of a batch that `make_score` fills in; the others a rollout brings."""


def make_optimizer(section: Optim) -> optax.GradientTransformation:
    """Returns AdamW on gradients of bounded global norm, with a linear warm-up and decay of the learning rate."""
    first, last = section.learning_rate / (section.warmup_steps + 1), section.learning_rate / 10
    schedule = optax.linear_schedule(first, section.learning_rate, section.warmup_steps)
    if section.decay_steps:
        decay = optax.linear_schedule(section.learning_rate, last, section.decay_steps)
        schedule = optax.join_schedules([schedule, decay], [section.warmup_steps]) if section.warmup_steps else decay
    return optax.chain(
        optax.clip_by_global_norm(section.max_grad_norm),
        optax.adamw(
            schedule if section.warmup_steps or section.decay_steps else section.learning_rate,
            b1=section.b1,
            b2=section.b2,
            eps=section.eps,
            weight_decay=section.weight_decay,
        ),
    )


def make_score(config: Config, model: Decoder, mesh: Mesh) -> Callable[..., Batch]:
    """`(trainable, base, reference, batch) -> batch` with the fields of `SCORED` that the config needs filled in.

    A reference whose weights are `base` comes without them (`drop_shared_base`): they are one argument then, and on a
    mesh that splits them both policies go over them in one pass.

    `reference` is None when no coefficient needs it: then nothing of it is computed; nor are its log-probs where only
    the exact KL is asked for, which reads its hidden states. The policy is not scored where a batch gets one update,
    whose own log-probs are the old ones, and nothing reads them before. All results are data. Old and
    reference log-probs are computed as the objective's are, at its micro-batch size, so that an unchanged policy has
    ratio 1 up to the last bit of a log-prob. The exact KL of the reward comes from the pass that gives the old
    log-probs; for that of the loss the hidden states of the reference are kept, `D` numbers a token.
    """

    def score(trainable: dict[str, Tree], base: Tree, reference: Reference | None, batch: Batch) -> Batch:
        policy = Reference(model, policy_of(trainable, base))
        reads_policy = config.needs_old_log_probs() or config.exact_reward() or "value_head" in trainable
        paired = reads_policy and _one_pass(mesh, policy, reference)
        other = None if reference is None else restore_shared_base(reference, base)

        def stats_of(
            one: Reference, part: Batch, hidden: jax.Array | None, against: ExactReference | None = None
        ) -> tuple[kljax.TokenStats, jax.Array]:
            return token_stats(
                one.model,
                one.policy,
                part.tokens,
                part.token_mask,
                temperature=config.temperature,
                mask=part.completion_mask,
                reference=against,
                tile=objectives.tile(config),
                first=config.data.max_prompt_length,
                group=config.shared_rows(),
                hidden=hidden,
            )

        def rows(part: Batch) -> Batch:
            found, kept, against, hidden, ref_hidden = {}, {}, None, None, None
            if paired and other is not None:
                hidden, ref_hidden = paired_hidden_states(
                    model,
                    policy.policy,
                    other.policy.adapter,
                    part.tokens,
                    part.token_mask,
                    prompt=config.data.max_prompt_length,
                    group=config.shared_rows(),
                )
            if other is not None:
                ref_stats, ref_hidden = stats_of(other, part, ref_hidden)
                if config.needs_ref_log_probs():
                    found["ref_log_probs"] = ref_stats.log_prob
                if config.exact_reward():
                    against = (ref_hidden, reference_head(config, model, other))
                if config.exact_loss():
                    kept["ref_hidden"] = ref_hidden
            if reads_policy:
                stats, hidden = stats_of(policy, part, hidden, against)
                found["old_log_probs"] = stats.log_prob
                if stats.kl is not None:
                    found["ref_exact_kl"] = stats.kl
                if "value_head" in trainable:
                    found["values"] = token_values(trainable["value_head"], hidden)
            masked = {name: kljax.masked(value, part.completion_mask) for name, value in found.items()}
            return dataclasses.replace(part, **jax.lax.stop_gradient(masked | kept))

        return map_micro_batches(rows, batch, _score_parts(config), together=config.shared_rows())

    return jax.jit(traced_once(score), out_shardings=batch_sharding(mesh))


def _one_pass(mesh: Mesh, policy: Reference, reference: Reference | None) -> bool:
    """Whether policy and reference go over the layers together: one base, two adapters, and weights to be gathered.

    On one device the weights are read no faster together, and twice the rows at a time are in the way of each other.
    """
    shared = reference is not None and reference.policy.params is None and reference.model == policy.model
    return shared and policy.policy.adapter is not None and mesh.shape["fsdp"] > 1


def make_prepare(config: Config, mesh: Mesh) -> Callable[..., Any]:
    """The compiled half of the objective that needs the whole rollout batch."""
    prepare = traced_once(objectives.make_preparation(config))
    return jax.jit(prepare, out_shardings=(batch_sharding(mesh), replicated(mesh), replicated(mesh)))


def make_update(
    config: Config, model: Decoder, optimizer: optax.GradientTransformation, state: TrainState, mesh: Mesh
) -> Callable[..., tuple[TrainState, Metrics]]:
    """`(state, base, batch, rows, coefficients, ref_head=None) -> (state, metrics)`: one optimizer update on some rows.

    The token weights are computed from the masks of all rows of the update before these are split, so gradients and
    metrics of the micro-batches only add. The state is donated and keeps its shardings.
    """
    objective = objectives.make_objective(config, model)
    gradient = jax.value_and_grad(objective, has_aux=True)

    def update(
        state: TrainState,
        base: Tree,
        batch: Batch,
        rows: jax.Array,
        coefs: objectives.Coefficients,
        *,
        ref_head: jax.Array | None = None,
    ) -> tuple[TrainState, Metrics]:
        # An update on all rows moves none from device to device: their order changes nothing.
        chosen = batch if len(rows) == row_count(batch) else take_rows(batch, rows)
        weighted = dataclasses.replace(chosen, token_weights=objectives.token_weights(config, chosen))
        parts = jax.lax.with_sharding_constraint(
            micro_batches(weighted, config.optim.micro_batches, together=config.shared_rows()), _micro_sharding(mesh)
        )

        def accumulate(total: Tree, part: Batch) -> tuple[Tree, objectives.LossMetrics]:
            (_, metrics), grads = gradient(state.trainable, base, part, coefs, ref_head)
            return jax.tree.map(jnp.add, total, grads), metrics

        zeros = jax.tree.map(jnp.zeros_like, state.trainable)
        grads, found = jax.lax.scan(accumulate, zeros, parts)
        norm = optax.tree.norm(grads)
        metrics = found.reduce().of_update() | {"grad_norm": kljax.WeightedSum(norm, jnp.ones_like(norm))}
        changes, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, changes)
        return dataclasses.replace(state, trainable=trainable, opt_state=opt_state), metrics

    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(traced_once(update), donate_argnums=0, out_shardings=(shardings, replicated(mesh)))


def update_rows(config: Config, key: jax.Array) -> list[jax.Array]:
    """The rows of each update on a rollout batch: for every epoch a new permutation, cut into equal parts.

    Completions of one prompt stay together, all of them or, where an update has fewer rows, as many as divide them.
    """
    rows, parts = config.rows_per_batch(), config.optim.updates_per_batch
    together = math.gcd(config.rollout.samples_per_prompt, rows // parts)
    chosen: list[jax.Array] = []
    for epoch in range(config.optim.epochs):
        order = jnp.arange(rows).reshape(-1, together)
        if parts > 1:
            order = jax.random.permutation(jax.random.fold_in(key, epoch), order)
        chosen.extend(order.reshape(parts, -1))
    return chosen


def _score_parts(config: Config) -> int:
    """Scoring goes over as many rows at a time as an update does."""
    return config.optim.updates_per_batch * config.optim.micro_batches


def _micro_sharding(mesh: Mesh) -> jax.sharding.NamedSharding:
    """Micro-batches on a leading axis that every device walks through; rows over the mesh."""
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, *batch_sharding(mesh).spec))
