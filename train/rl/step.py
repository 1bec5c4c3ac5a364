"""The compiled functions of an RL step: score a rollout batch, prepare it, update on it.

Each compiles once, and none of them waits for the host.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import kljax
from train.config.optim import Optim
from train.config.plan import Plan
from train.config.schema import Config
from train.models import Decoder
from train.models.experts import NO_EXPERT
from train.models.sharding import axis_size, batch_sharding, replicated
from train.rl import preparation
from train.rl.loss_metrics import LossMetrics
from train.rl.metrics import SHARE, Metrics, is_beyond, single
from train.rl.objective import make_objective, tile
from train.rl.optimizer import next_learning_rate
from train.rl.policy import ScoredPolicy, Sequences, paired_slot_states, slot_states, token_stats, token_values
from train.rl.reference import reference_head
from train.rl.routing import Routers, choice_bias_metrics
from train.rl.state import TrainState, keep_unless, policy_of
from train.rl.terms import Coefficients, make_weighting
from train.rl.token_values import TokenValues
from train.rl.tracing import traced_once
from train.sequences.batch import (
    Batch,
    map_micro_batches,
    merge_micro_batches,
    micro_batches,
    move_columns,
    prompt_lengths,
    required,
    row_count,
    take_rows,
)
from train.sequences.forest import Forest
from train.sequences.token_fields import ROUTES

Tree = Any
MicroBatch = tuple[Batch, Forest | None]

SCORED = ("old_log_probs", "ref_log_probs", "ref_hidden", "ref_exact_kl", "values", "sum_squared_probs")
"""The fields of a batch that scoring fills in; a rollout brings the others."""


class ScoreProgram(Protocol):
    """Fills in the fields of `SCORED` that are needed; `reference` is None where it is scored apart, or unused."""

    def __call__(
        self,
        trainable: dict[str, Tree],
        base: Tree,
        reference: ScoredPolicy | None,
        batch: Batch,
        *,
        rows: jax.Array | None = None,
        packed: Forest | None = None,
    ) -> Batch: ...


class UpdateProgram(Protocol):
    """Makes one update on the `rows` of a prepared batch; `ref_head` is the reference's, for the exact KL.

    A program that is made per token returns the values of its tokens too.
    """

    def __call__(
        self,
        state: TrainState,
        base: Tree,
        batch: Batch,
        rows: jax.Array,
        coefs: Coefficients,
        *,
        ref_head: kljax.Head | None = None,
        packed: Forest | None = None,
    ) -> tuple[TrainState, Metrics, *tuple[TokenValues, ...]]: ...


ReferenceScore = Callable[[Tree, ScoredPolicy, Batch], tuple[jax.Array, jax.Array]]


def make_score(plan: Plan, model: Decoder, mesh: Mesh) -> ScoreProgram:
    """Compiles `(trainable, base, reference, batch) -> batch`, which fills in the fields of `SCORED` that are needed.

    On a mesh that splits a base which both policies share, they go through the layers in one pass. Old and reference
    log-probs are computed as the objective computes them, at its micro-batch size, so that an unchanged policy has
    ratio 1 up to the last bit of a log-prob. All results are treated as constants.

    Not computed: the reference if no term needs it; its log-probs if only the exact KL is used, which reads its hidden
    states; the policy if a batch gets one update, whose log-probs are the old ones, and nothing reads them before.

    Without a reference it scores the policy alone: `make_reference_score` does the rest.

    With `rows` and `packed` of a `Packing`, the sequences lie in packed slots. One program is compiled for each number
    of packed rows.
    """
    stats_of = _make_stats(plan)
    layout = plan.layout
    score_parts = _score_parts(plan.config.optim)
    replay = plan.config.routing.replay

    def score(
        trainable: dict[str, Tree],
        base: Tree,
        reference: ScoredPolicy | None,
        batch: Batch,
        *,
        rows: jax.Array | None = None,
        packed: Forest | None = None,
    ) -> Batch:
        policy = ScoredPolicy(model, policy_of(trainable, base))
        in_one_pass = plan.scores_policy and _one_pass(mesh, policy, reference)
        reference = None if reference is None else reference.on_base(base)

        def score_rows(part: Batch, packed: Forest | None = None) -> Batch:
            per_token: dict[str, jax.Array] = {}
            states: dict[str, Any] = {}
            hidden = ref_hidden = exact = None
            sequences = Sequences.of(part, layout, packed)
            # The reference chooses its experts for itself.
            ref_sequences = sequences.without_routes()
            sequences = sequences.for_policy(replay, scoring=True)
            if in_one_pass and reference is not None:
                hidden, ref_hidden = paired_slot_states(policy, reference.policy.adapter, sequences)
            if reference is not None:
                ref_stats, ref_hidden = stats_of(reference, ref_sequences, hidden=ref_hidden)
                if plan.ref_log_probs:
                    per_token["ref_log_probs"] = ref_stats.log_prob
                if plan.exact_kl:
                    states["ref_hidden"] = sequences.forest.gather(ref_hidden)
                if plan.exact_reward:
                    exact = kljax.ReferenceStates(sequences.forest.gather(ref_hidden), reference_head(plan, reference))
            if plan.scores_policy:
                if replay == "old_policy":
                    hidden, routed = slot_states(policy, sequences)
                    routes = {} if routed is None else {ROUTES: sequences.forest.gather(routed.routes, NO_EXPERT)}
                    states["fields"] = {**part.fields, **routes}
                options = {"reference": exact, "sum_squared_probs": plan.sum_squared_probs}
                stats, hidden = stats_of(policy, sequences, hidden=hidden, **options)
                per_token["old_log_probs"] = stats.log_prob
                if stats.kl is not None:
                    per_token["ref_exact_kl"] = stats.kl
                if stats.sum_squared_probs is not None:
                    per_token["sum_squared_probs"] = stats.sum_squared_probs
                if plan.value_head:
                    per_token["values"] = token_values(trainable["value_head"], hidden, sequences.forest)
            masked = {name: kljax.masked(value, part.completion_mask) for name, value in per_token.items()}
            return dataclasses.replace(part, **jax.lax.stop_gradient(states | masked))

        if packed is None:
            return map_micro_batches(score_rows, batch, score_parts, group=layout.group)
        parts = micro_batches(batch if rows is None else take_rows(batch, rows), len(packed.places))
        split = jax.lax.with_sharding_constraint((parts, packed), _micro_sharding(mesh))
        done = merge_micro_batches(jax.lax.map(lambda part: score_rows(*part), split))
        return done if rows is None else take_rows(done, jnp.argsort(rows))

    return jax.jit(traced_once(score, size_of=packed_size), out_shardings=batch_sharding(mesh))


def make_reference_score(plan: Plan, model: Decoder, mesh: Mesh) -> ReferenceScore:
    """Compiles `(base, reference, batch) -> (log_probs, log_probs)`: log-probs of the reference alone, in float32.

    The first, [B, T], are split over the mesh as the batch; the second, of completions alone, [B, C], are whole on
    every device, for the host. They are computed as in `make_score`, and treated as constants.
    """
    stats_of = _make_stats(plan)
    layout = plan.layout
    score_parts = _score_parts(plan.config.optim)

    def score_reference(base: Tree, reference: ScoredPolicy, batch: Batch) -> tuple[jax.Array, jax.Array]:
        reference = reference.on_base(base)

        def score_rows(part: Batch) -> jax.Array:
            stats, _ = stats_of(reference, Sequences.of(part, layout).without_routes())
            return jax.lax.stop_gradient(kljax.masked(stats.log_prob, part.completion_mask))

        log_probs = map_micro_batches(score_rows, batch, score_parts, group=layout.group)
        return log_probs, move_columns(log_probs, prompt_lengths(batch), layout.completion or log_probs.shape[1])

    return jax.jit(traced_once(score_reference), out_shardings=(batch_sharding(mesh), replicated(mesh)))


def packed_size(*_: Any, packed: Forest | None = None, **__: Any) -> tuple[int, ...] | None:
    """Returns the shape of packed slots, for each of which a program compiles once; None for those of the layout."""
    return None if packed is None else (*packed.readers.shape, *packed.branches.shape)


def _make_stats(plan: Plan) -> Callable[..., tuple[kljax.TokenStats, jax.Array]]:
    """Makes the function that scores rows with a policy, `token_stats` at the temperature of the config."""
    config = plan.config
    return functools.partial(token_stats, temperature=config.temperature, tile=tile(config.log_probs))


def _one_pass(mesh: Mesh, policy: ScoredPolicy, reference: ScoredPolicy | None) -> bool:
    """Whether policy and reference go through the layers together: one base, two adapters, weights to be gathered.

    On one device a shared pass reads the weights no faster, and twice the rows compete for the cache.
    """
    shared = reference is not None and reference.shares_base and reference.model == policy.model
    shared = shared and policy.model.config.experts is None  # whose routes may differ
    return shared and policy.policy.adapter is not None and axis_size("embed", mesh) > 1


def make_prepare(plan: Plan, mesh: Mesh) -> preparation.Preparation:
    """Compiles the part of the objective that needs the whole rollout batch."""
    prepare = traced_once(preparation.make_preparation(plan))
    return jax.jit(prepare, out_shardings=(batch_sharding(mesh), replicated(mesh), replicated(mesh)))


def make_control(plan: Plan, mesh: Mesh) -> preparation.Control | None:
    """Compiles the step of the controllers of terms of the loss; None if their coefficients stay as they are."""
    if not plan.steered:
        return None
    return jax.jit(traced_once(preparation.make_control(plan)), out_shardings=replicated(mesh))


def make_update(
    plan: Plan,
    model: Decoder,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    mesh: Mesh,
    *,
    per_token: bool = False,
) -> UpdateProgram:
    """Compiles `(state, base, batch, rows, coefficients, ref_head=None, packed=None) -> (state, metrics)`, one update.

    With `per_token` the `TokenValues` of the update are a third result.

    The token weights come from the masks of all rows of the update, before it is split: gradients and metrics of the
    micro-batches only add. The state is donated and keeps its shardings. With the `rows` and `packed` of a `Packing`,
    the sequences lie in packed slots. One program is compiled for each number of packed rows.

    An update whose loss or gradient is not finite is skipped: weights and optimizer stay as they are. The metric
    `skipped_updates` and the guard's part of the state count it. With `guard.action: skip` an update beyond a limit is
    skipped likewise; the limit is compared with the metrics of all its rows.
    """
    config = plan.config
    guard = plan.config.guard
    with_token_weights = make_weighting(plan)
    gradient = _make_gradient(plan, model)
    routers = Routers.of(config.routing, model)
    advance = _advance_in_host_memory if config.optim.host_memory else _advance
    moves = plan.rows_move
    group = plan.layout.group

    def split(batch: Batch, rows: jax.Array, packed: Forest | None) -> tuple[Batch, Forest | None]:
        count = config.optim.micro_batches if packed is None else len(packed.places)
        moved = packed is not None and moves and count * axis_size("rows", mesh) > 1
        # An update on all rows ignores their order, so that no row moves between devices.
        numbered = dataclasses.replace(batch, row_numbers=jnp.arange(row_count(batch), dtype=jnp.int32))
        chosen = numbered if len(rows) == row_count(batch) and not moved else take_rows(numbered, rows)
        weighted = with_token_weights(chosen)
        parts = micro_batches(weighted, count, group=1 if moved else group)
        return jax.lax.with_sharding_constraint((parts, packed), _micro_sharding(mesh))

    def update(
        state: TrainState,
        base: Tree,
        batch: Batch,
        rows: jax.Array,
        coefs: Coefficients,
        *,
        ref_head: kljax.Head | None = None,
        packed: Forest | None = None,
    ) -> tuple[TrainState, Metrics, *tuple[TokenValues, ...]]:
        parts = split(batch, rows, packed)
        grads, metric_sums = gradient(state.trainable, base, parts, coefs, ref_head)
        # Sums of squares serve the norm and the guard: one reduction of each gradient is compiled, and not two.
        squares = jax.tree.map(lambda x: jnp.sum(jnp.square(x)), grads)
        norm = jnp.sqrt(optax.tree.sum(squares))
        sums = metric_sums.reduce()
        rate = next_learning_rate(config.optim, state.opt_state) * state.guard.rate
        metrics = sums.of_update() | {"grad_norm": single(norm), "learning_rate": single(rate)}
        applied = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"].value())
        if guard.action == "skip":
            beyond = applied & is_beyond(guard, metrics)
            applied = applied & ~beyond
            metrics[SHARE] = single(1.0 * beyond)
        changes, opt_state = advance(optimizer, grads, state, applied)
        if guard.action == "lower_learning_rate":
            changes = jax.tree.map(lambda x: x * state.guard.rate.astype(x.dtype), changes)
        if routers is not None:
            changes = routers.changes(changes, sums.choices)
        trainable = keep_unless(applied, optax.apply_updates(state.trainable, changes), state.trainable)
        counts = state.guard.after(applied, squares)
        metrics |= {"skipped_updates": single(1.0 - applied), **choice_bias_metrics(trainable)}
        results = dataclasses.replace(state, trainable=trainable, opt_state=opt_state, guard=counts), metrics
        return (*results, TokenValues(required(parts[0].row_numbers), metric_sums.per_token)) if per_token else results

    shardings = (jax.tree.map(lambda x: x.sharding, state), replicated(mesh), _micro_sharding(mesh))[: 2 + per_token]
    return jax.jit(traced_once(update, size_of=packed_size), donate_argnums=0, out_shardings=shardings)


def _make_gradient(plan: Plan, model: Decoder) -> Callable[..., tuple[Tree, LossMetrics]]:
    """Makes `(trainable, base, (micro-batches, packed), coefficients, ref_head) -> (gradient, metrics)` of an update.

    The gradient is the sum over the micro-batches, the metrics lie along a leading axis.
    """
    differentiate = jax.value_and_grad(make_objective(plan, model), has_aux=True)
    routers = Routers.of(plan.config.routing, model)
    layout = plan.layout

    def gradient(
        trainable: dict[str, Tree],
        base: Tree,
        parts: MicroBatch,
        coefs: Coefficients,
        ref_head: kljax.Head | None,
    ) -> tuple[Tree, LossMetrics]:
        totals = None
        if routers is not None and routers.need_totals and len(parts[0].tokens) > 1:
            policy = ScoredPolicy(model, policy_of(trainable, base))
            counted = jax.lax.map(lambda part: routers.count(policy, Sequences.of(part[0], layout, part[1])), parts)
            totals = jax.tree.map(lambda x: x.sum(0), counted)

        def accumulate(total: Tree, part: MicroBatch) -> tuple[Tree, LossMetrics]:
            rows, packed = part
            (_, metrics), grads = differentiate(trainable, base, rows, coefs, ref_head, packed=packed, totals=totals)
            return jax.tree.map(jnp.add, total, grads), metrics

        grads, metrics = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, trainable), parts)
        return (grads if routers is None else routers.gradients(grads)), metrics

    return gradient


def _advance(
    optimizer: optax.GradientTransformation, grads: Tree, state: TrainState, applied: jax.Array
) -> tuple[Tree, Tree]:
    """Returns the changes of the optimizer, and its new state if the update is applied, else the old one."""
    changes, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
    return changes, keep_unless(applied, opt_state, state.opt_state)


def _advance_in_host_memory(
    optimizer: optax.GradientTransformation, grads: Tree, state: TrainState, applied: jax.Array
) -> tuple[Tree, Tree]:
    """As `_advance`, with moments in the memory of the host; a skipped update leaves them as they are."""
    update = optax.with_extra_args_support(optimizer).update
    return update(grads, state.opt_state, state.trainable, finite=applied)


def update_rows(config: Config, key: jax.Array) -> list[jax.Array]:
    """Draws the rows of each update on a rollout batch: a permutation for every epoch, cut into equal parts.

    Completions of one prompt stay in one update; if an update has fewer rows, the largest divisor of them does.
    """
    rows = config.rows_per_batch()
    parts = config.optim.updates_per_batch
    group = math.gcd(config.rollout.samples_per_prompt, rows // parts)
    updates: list[jax.Array] = []
    for epoch in range(config.optim.epochs):
        order = jnp.arange(rows).reshape(-1, group)
        if parts > 1:
            order = jax.random.permutation(jax.random.fold_in(key, epoch), order)
        updates.extend(order.reshape(parts, -1))
    return updates


def _score_parts(section: Optim) -> int:
    """Returns the number of parts of a rollout batch, so that scoring and updates have the same micro-batch size."""
    return section.updates_per_batch * section.micro_batches


def _micro_sharding(mesh: Mesh) -> jax.sharding.NamedSharding:
    """Returns the sharding of micro-batches: a leading axis that is not split, rows over the mesh."""
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, *batch_sharding(mesh).spec))
