"""The one place that composes a loss.

`make_preparation` turns a scored rollout batch into advantages, which are treated as constants; `make_objective` turns
a micro-batch of it into a scalar. No formula is written here: every term is a call of kljax.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

import kljax
from kljax.typing import Estimator
from train.config.algorithms import UserFunction
from train.config.kl import KL, LossKL, RewardKL
from train.config.loss import Loss
from train.config.plan import Plan
from train.config.schema import Config, LogProbs
from train.config.types import Aggregation, EmptyRows
from train.models import Decoder
from train.rl import algorithms
from train.rl.correction import loss_mask, make_correction
from train.rl.kl_metrics import KL_ESTIMATE, KL_EXACT, ROLLOUT_KL_MAX, largest_of
from train.rl.metrics import SLOPE, WITHOUT_GRADIENT, LargestToken, Metrics, single
from train.rl.policy import ScoredPolicy, Sequences, fused_loss, slot_states, token_stats, token_values
from train.rl.routing import RouterTotals, router_choices, router_losses, routing_metrics
from train.rl.sampling_bias import measure_sampling_bias
from train.rl.state import keep_unless, policy_of
from train.sequences.batch import Batch, per_token_fields, place_rewards, required
from train.sequences.forest import Forest

Array = jax.Array
Tree = Any
Coefficients = dict[str, Array]
Controllers = dict[str, kljax.ControllerState]
Preparation = Callable[[Batch, Controllers], tuple[Batch, Controllers, Metrics]]
Control = Callable[[Controllers, Metrics, Array], Controllers]
Objective = Callable[..., tuple[Array, "LossMetrics"]]


class LossMetrics(NamedTuple):
    """The metrics of one micro-batch, detached.

    Attributes:
      parts: the loss and each of its terms, scalars that add up over the micro-batches of an update.
      tokens: statistics of the tokens.
      per_token: [n, T] by the names of `token_values.PER_TOKEN`; micro-batches stay apart.
      choices: `router_choices`, which add up over the micro-batches too.
    """

    parts: dict[str, Array]
    tokens: Metrics
    per_token: dict[str, Array]
    choices: Array | None = None

    def reduce(self) -> "LossMetrics":
        """Merges the micro-batches that lie along the leading axis."""
        parts = {name: value.sum(0) for name, value in self.parts.items()}
        tokens = {name: metric.reduce() for name, metric in self.tokens.items()}
        choices = None if self.choices is None else self.choices.sum(0)
        return LossMetrics(parts, tokens, self.per_token, choices)

    def of_update(self) -> Metrics:
        """Returns the metrics of a whole update, whose parts have been summed."""
        metrics: Metrics = {name: single(value) for name, value in self.parts.items()}
        for name, metric in self.tokens.items():
            if name == SLOPE and isinstance(metric, kljax.WeightedSum):
                metrics[WITHOUT_GRADIENT] = single(1.0 * ((metric.weight > 0) & (metric.sum == 0)))
            else:
                metrics[name] = metric
        return metrics


def tile(section: LogProbs) -> kljax.Tile | None:
    """Returns the tile size of the chunked LM head; None leaves it to the library."""
    return None if section.tile is None else kljax.Tile(section.tile.tokens, section.tile.vocab)


def coefficients(config: Config, controllers: Controllers | None = None) -> Coefficients:
    """Returns the coefficients of the loss terms as arrays, so that changing one does not recompile.

    The set of terms is static: a term whose coefficient is 0 in the config is not computed.

    Args:
      config: the config.
      controllers: states of the controllers; a term without one has the coefficient of the config.
    """
    values = {
        "kl_loss": config.kl.loss.coef,
        "rollout_kl": config.kl.rollout.coef,
        "entropy": config.loss.entropy_coef,
        "value": config.loss.value_coef,
        "router_balance": config.routing.balance_coef,
        "router_z": config.routing.z_coef,
    }
    terms = {"loss": "kl_loss", "entropy": "entropy"}
    steered = {terms[name]: state.coef for name, state in (controllers or {}).items() if name in terms}
    return {name: jnp.asarray(value, float) for name, value in values.items()} | steered


def token_weights(
    plan: Plan, loss: Loss, batch: Batch, mode: Aggregation | None = None, empty_rows: EmptyRows | None = None
) -> Array:
    """Computes the token weights of one optimizer batch, before it is split into micro-batches.

    Args:
      plan: has the number of prompts.
      loss: says how to reduce.
      batch: the rows of the optimizer batch.
      mode: the reduction of a term with one of its own; None takes that of the loss.
      empty_rows: likewise.
    """
    mode = mode or loss.aggregation
    prompts = mode == "prompt_mean"
    return kljax.token_weights(
        loss_mask(loss, batch),
        mode=mode,
        # A term may have another reduction than the loss, and only this one divides by a length.
        max_length=loss.max_length if mode == "seq_mean_token_sum_norm" else None,
        group_ids=batch.group_ids if prompts else None,
        num_groups=plan.num_groups if prompts else None,
        empty_rows=empty_rows or loss.empty_rows,
    )


def with_token_weights(plan: Plan, loss: Loss, term: LossKL, batch: Batch) -> Batch:
    """Adds the token weights of the loss, and those of its KL and of the entropy bonus with reductions of their own."""
    batch = dataclasses.replace(batch, token_weights=token_weights(plan, loss, batch))
    if "loss" in plan.controllers and term.aggregation is not None:
        weights = token_weights(plan, loss, batch, term.aggregation, term.empty_rows)
        batch = dataclasses.replace(batch, kl_token_weights=weights)
    if loss.entropy_aggregation is not None:
        weights = token_weights(plan, loss, batch, loss.entropy_aggregation)
        batch = dataclasses.replace(batch, entropy_token_weights=weights)
    return batch


def make_preparation(plan: Plan) -> Preparation:
    """Makes `(batch, controller states) -> (batch, controller states, metrics)`, which adds constants to the batch.

    They are advantages, returns and corrections; a loss that reads no advantages has none. Every mean is over the whole
    rollout batch. The logged reference KL is never scaled or shifted. The controller of the loss is updated after the
    updates, by `make_control`. Corrections see the trainer's log-probs, also where the loss takes log-probs of the
    sampler for the old ones.
    """
    controllers = algorithms.make_controllers(plan)
    correct = make_correction(plan)
    loss = plan.config.loss
    section = plan.config.kl
    options = plan.config.advantage
    in_groups = plan.config.rollout.samples_per_prompt > 1

    def with_advantages(batch: Batch, states: Controllers) -> tuple[Batch, Controllers, Metrics]:
        metrics: Metrics = {}
        mask = batch.completion_mask
        next_states = dict(states)

        def steer(name: str, kl: Array) -> None:
            steered = controllers[name].update(states[name], kl, mask.any(-1).sum())
            next_states[name] = keep_unless(jnp.isfinite(kl), steered, states[name])

        shaped = None
        if "reward" in controllers:
            coef = states["reward"].coef
            shaped, kl = _kl_shaped(plan, section.reward, batch, coef)
            metrics["kl_reward"] = kljax.WeightedSum.of(kl, mask)
            metrics["kl_coef"] = single(coef)
            steer("reward", metrics["kl_reward"].value())
        if plan.advantage is None:
            return batch, next_states, metrics
        advantages, returns = algorithms.estimate_advantages(plan, options, batch, shaped)
        if options.zeros == "drop":
            batch = dataclasses.replace(batch, kept_mask=_kept(batch) & (advantages != 0))
        if options.scale_by_mean:
            weights = token_weights(plan, loss, batch)
            advantages = kljax.balanced_advantages(advantages, mask, balance=options.balance, weights=weights)
        if options.whiten:
            advantages = kljax.masked_whiten(advantages, mask, ddof=options.whiten_ddof, eps=options.whiten_eps)
        if "advantage" in controllers:
            advantages, mean_kl = kljax.centered_kl_advantages(
                advantages,
                required(batch.old_log_probs),
                required(batch.ref_log_probs),
                mask,
                coef=states["advantage"].coef,
                estimator=section.advantage.estimator,
            )
            metrics["kl_advantage"] = single(mean_kl)
            if "advantage" in plan.moving:
                coef = states["advantage"].coef
                metrics["kl_advantage_coef"] = single(coef)
            steer("advantage", mean_kl)
        return dataclasses.replace(batch, advantages=advantages, returns=returns), next_states, metrics

    def prepare(batch: Batch, states: Controllers) -> tuple[Batch, Controllers, Metrics]:
        batch, next_states, metrics = with_advantages(batch, states)
        batch = dataclasses.replace(batch, episode_rows=None)
        if in_groups:
            spread = kljax.groups_with_spread(
                required(batch.rewards), required(batch.group_ids), num_groups=plan.num_groups
            )
            metrics["groups_with_spread"] = kljax.WeightedSum.of(spread.astype(float), jnp.ones_like(spread))
        batch, measured = correct(batch)
        if loss.old_log_probs == "sampler":
            batch = dataclasses.replace(batch, old_log_probs=batch.rollout_log_probs)
        return batch, next_states, metrics | measured

    return prepare


def make_control(plan: Plan) -> Control:
    """Makes `(controller states, metrics by controller, mask) -> controller states`, after the updates on a batch."""
    controllers = algorithms.make_controllers(plan)

    def control(states: Controllers, measured: Metrics, mask: Array) -> Controllers:
        next_states = dict(states)
        for name, metric in measured.items():
            steered = controllers[name].update(states[name], metric.value(), mask.any(-1).sum())
            next_states[name] = keep_unless(jnp.isfinite(metric.value()), steered, states[name])
        return next_states

    return control


def _kl_shaped(plan: Plan, section: RewardKL, batch: Batch, coef: Array) -> tuple[Array, Array]:
    """Subtracts the KL from the token rewards, and returns both."""
    mask = batch.completion_mask
    rewards = place_rewards(batch)
    if plan.exact_reward:
        kl = kljax.masked(required(batch.ref_exact_kl), mask)
        return kljax.subtract_kl(rewards, kl, mask, coef=coef), kl
    return kljax.kl_shaped_rewards(
        rewards,
        required(batch.old_log_probs),
        required(batch.ref_log_probs),
        mask,
        coef=coef,
        estimator=cast(Estimator, section.estimator),
        value_clip=section.value_clip,
    )


def make_objective(plan: Plan, model: Decoder) -> Objective:
    """Makes the loss of one micro-batch, `sum_t weight_t * (w_t * policy + sum_k coef_k * term_k)_t`, with its metrics.

    The sum is over the tokens that no correction rejects, and `w_t` are the weights of the corrections. A loss that
    treats tokens alone is fused with the LM head, unless sequences share trained tokens.

    The signature is `objective(trainable, base, batch, coefficients, ref_head, *, packed, totals)`; `ref_head` comes
    from `reference_head`, for the exact KL; `packed` are slots of the sequences, if those of the layout are not meant;
    `totals` of the update are for router losses, None if the micro-batch is all of it. Gradient: to `trainable` only.
    Metrics are treated as constants.
    """
    config = plan.config
    section = plan.config.loss
    kl = plan.config.kl
    entropy: Literal[True, "constant"] = True if plan.entropies else "constant"
    fixed: dict[str, Any] = {"temperature": config.temperature, "tile": tile(config.log_probs), "entropy": entropy}
    terms_of = functools.partial(_terms, plan=plan, section=section, kl=kl)

    def objective(
        trainable: dict[str, Tree],
        base: Tree,
        batch: Batch,
        coefs: Coefficients,
        ref_head: kljax.Head | None = None,
        *,
        packed: Forest | None = None,
        totals: RouterTotals | None = None,
    ) -> tuple[Array, LossMetrics]:
        policy = ScoredPolicy(model, policy_of(trainable, base))
        sequences = Sequences.of(batch, plan.layout, packed)
        replayed = sequences.for_policy(config.routing.replay)
        options = fixed | {"reference": _exact_reference(plan, kl.loss, batch, ref_head)}
        routed = None
        if model.config.experts is not None:
            options["hidden"], routed = slot_states(policy, replayed)
        shared = sequences.forest.readers.shape[-1] > 1
        if plan.treats_tokens_alone and not shared:
            options["token_chunk"] = config.log_probs.token_chunk
            score = functools.partial(fused_loss, policy, sequences, **options)
            loss, terms, hidden = _fused_terms(terms_of, score, batch, coefs)
        else:
            stats, hidden = token_stats(policy, sequences, **options)
            terms, scale = terms_of(stats, batch, coefs)
            loss = sum((scale[name] * term.sum() for name, term in terms.weighted.items()), jnp.float32(0))
        scored = _with_old_log_probs(batch, terms.stats)
        reduced = {name: term.sum() for name, term in terms.weighted.items()}
        mask = loss_mask(section, batch)
        kept_mask = _kept(batch)
        if plan.value_head:
            values = token_values(trainable["value_head"], hidden, sequences.forest)
            returns = required(batch.returns)
            old = required(batch.values)
            term = kljax.value_loss(values, old, returns, mask, clip=section.value_clip)
            reduced["value"] = (kljax.masked(term, kept_mask) * required(batch.token_weights)).sum()
            loss = loss + coefs["value"] * reduced["value"]
        metrics = _token_metrics(section, kl, terms.stats, scored)
        if plan.measures_sampling_bias(recorded=batch.rollout_log_probs is not None):
            metrics |= measure_sampling_bias(terms.stats, batch, model.config.vocab_size)
        masked = dataclasses.replace(scored, completion_mask=mask)
        metrics |= algorithms.clip_metric(plan, section, terms.stats, masked)
        if isinstance(section, UserFunction) and plan.advantage is not None:
            metrics[SLOPE] = _policy_slope(plan, section, terms.stats, masked, coefs.get("key"))
        if routed is not None:
            losses = router_losses(config.routing, routed, replayed, totals)
            loss = loss + sum(coefs[name] * value for name, value in losses.items())
            reduced = reduced | losses
            counts = sequences.forest.counts
            recorded = sequences.recorded_routes()
            metrics |= routing_metrics(model.config, routed, counts, recorded, verify=config.routing.verify)
        if plan.steers_loss:
            metrics["kl_loss_per_token"] = kljax.WeightedSum.of(jax.lax.stop_gradient(required(terms.kl)), kept_mask)
        parts = {"loss": loss, **{f"{name}_loss": value for name, value in reduced.items() if name != "entropy"}}
        per_token = _per_token(terms.stats, batch, kept_mask)
        choices = router_choices(config.routing, routed, sequences)
        return loss, LossMetrics(jax.lax.stop_gradient(parts), metrics, jax.lax.stop_gradient(per_token), choices)

    return objective


def _policy_slope(
    plan: Plan, section: Loss, stats: kljax.TokenStats, batch: Batch, key: Array | None
) -> kljax.WeightedSum:
    """Sums the derivatives of the policy loss to log-probs and entropies, beside the tokens with an advantage."""
    kept_mask = _kept(batch)

    def total(log_prob: Array, entropy: Array) -> Array:
        moved = dataclasses.replace(stats, log_prob=log_prob, entropy=entropy)
        return kljax.masked(algorithms.policy_loss(plan, section, moved, batch, key), kept_mask).sum()

    constants = jax.lax.stop_gradient((stats.log_prob, required(stats.entropy)))
    slopes = jax.grad(total, argnums=(0, 1))(*constants)
    size = sum(jnp.abs(slope).sum() for slope in slopes)
    count = (kept_mask & (required(batch.advantages) != 0)).sum()
    return kljax.WeightedSum(jnp.asarray(size, float), count.astype(float))


class _Terms(NamedTuple):
    """Statistics of the tokens, each term times its token weights, and the KL of the loss, if its coefficient moves."""

    stats: kljax.TokenStats
    weighted: dict[str, Array]
    kl: Array | None


TermsOf = Callable[[kljax.TokenStats, Batch, Coefficients], tuple[_Terms, dict[str, Array]]]


def _fused_terms(
    terms_of: TermsOf, score: Callable[..., tuple[Array, _Terms, Array]], batch: Batch, coefs: Coefficients
) -> tuple[Array, _Terms, Array]:
    """Computes loss, terms and hidden states with a loss that sees one chunk of tokens at a time."""

    def token_loss(stats: kljax.TokenStats, inputs: tuple[Batch, Coefficients]) -> tuple[Array, _Terms]:
        terms, scale = terms_of(stats, *inputs)
        loss = sum((scale[name] * term for name, term in terms.weighted.items()), jnp.zeros_like(stats.log_prob))
        return loss, terms

    return score(token_loss=token_loss, per_token=(per_token_fields(batch), coefs))


def _kept(batch: Batch) -> Array:
    """Returns the tokens that the loss sums over."""
    return batch.completion_mask if batch.kept_mask is None else batch.kept_mask


def _terms(
    stats: kljax.TokenStats, batch: Batch, coefs: Coefficients, *, plan: Plan, section: Loss, kl: KL
) -> tuple[_Terms, dict[str, Array]]:
    """Computes the terms of the head, times their token weights, and their coefficients."""
    weights = required(batch.token_weights)
    mask = loss_mask(section, batch)
    kept_mask = _kept(batch)
    batch = dataclasses.replace(_with_old_log_probs(batch, stats), completion_mask=mask)
    terms: dict[str, Array] = {}
    scale: dict[str, Array] = {}
    if plan.loss is not None:
        terms["policy"] = algorithms.policy_loss(plan, section, stats, batch, coefs.get("key"))
        if batch.correction_weights is not None:
            terms["policy"] *= batch.correction_weights
        scale["policy"] = jnp.float32(1)
    if "loss" in plan.controllers:
        terms["kl"] = _reference_kl(plan, kl.loss, stats, batch)
        scale["kl"] = coefs["kl_loss"]
    if kl.rollout.coef > 0:
        terms["rollout_kl"] = kljax.rollout_kl_loss(
            stats.log_prob,
            required(batch.rollout_log_probs),
            mask,
            **kl.rollout.model_dump(exclude={"coef"}),
        )
        scale["rollout_kl"] = coefs["rollout_kl"]
    if section.has_entropy_term():
        terms["entropy"] = required(stats.entropy)
        scale["entropy"] = -coefs["entropy"]
    own_weights = {"kl": batch.kl_token_weights, "entropy": batch.entropy_token_weights}
    term_weights = {name: own for name, own in own_weights.items() if own is not None}
    weighted = {name: kljax.masked(term, kept_mask) * term_weights.get(name, weights) for name, term in terms.items()}
    return _Terms(stats, weighted, terms["kl"] if plan.steers_loss else None), scale


def _with_old_log_probs(batch: Batch, stats: kljax.TokenStats) -> Batch:
    """Fills in old log-probs that were not scored: this update is the first, so they are its own."""
    if batch.old_log_probs is not None:
        return batch
    return dataclasses.replace(batch, old_log_probs=jax.lax.stop_gradient(stats.log_prob))


def _exact_reference(
    plan: Plan, section: LossKL, batch: Batch, ref_head: kljax.Head | None
) -> kljax.ReferenceStates | None:
    """Returns the reference of an update's exact KL, or None without one."""
    if not plan.exact_kl:
        return None
    if ref_head is None and not plan.shares_head:
        raise ValueError("ref_head: got None, expected the head of the reference, which is not the policy's")
    return kljax.ReferenceStates(required(batch.ref_hidden), ref_head, section.direction)


def _reference_kl(plan: Plan, section: LossKL, stats: kljax.TokenStats, batch: Batch) -> Array:
    if plan.exact_loss:
        return required(stats.kl)
    mask = batch.completion_mask
    by_token = section.importance_corrected and section.importance_level == "token"
    estimates = kljax.reference_kl_loss(
        stats.log_prob,
        required(batch.ref_log_probs),
        mask,
        estimator=cast(Estimator, section.estimator),
        gradient=section.gradient,
        sampling_log_probs=required(batch.old_log_probs) if by_token else None,
        max_ratio=section.max_ratio,
        log_ratio_clip=section.log_ratio_clip,
        value_clip=section.value_clip,
    )
    if by_token or not section.importance_corrected:
        return estimates
    ratios_of = kljax.sequence_ratios if section.importance_level == "sequence" else kljax.geometric_ratios
    ratios = ratios_of(stats.log_prob, required(batch.old_log_probs), mask)
    return kljax.broadcast_to_tokens(ratios, mask) * estimates


def _per_token(stats: kljax.TokenStats, batch: Batch, kept_mask: Array) -> dict[str, Array]:
    """Returns the values of each token that a recording may ask for; a program that returns none computes none."""
    weights = required(batch.token_weights)
    if batch.correction_weights is not None:
        weights = weights * batch.correction_weights
    values = {
        "policy_log_probs": stats.log_prob,
        "entropy": required(stats.entropy),
        "loss_weights": kljax.masked(weights, kept_mask),
    }
    return values if stats.kl is None else {**values, "exact_kl": stats.kl}


def _token_metrics(loss: Loss, kl: KL, stats: kljax.TokenStats, batch: Batch) -> Metrics:
    mask = batch.completion_mask
    metrics: Metrics = {
        "entropy": kljax.WeightedSum.of(required(stats.entropy), mask),
        "ppo_kl": kljax.ppo_kl(stats.log_prob, required(batch.old_log_probs), mask),
    }
    rows = jnp.arange(len(mask), dtype=jnp.int32) if batch.row_numbers is None else batch.row_numbers
    largest = functools.partial(LargestToken.of, mask=mask, rows=rows, log_probs=stats.log_prob)
    if batch.ref_log_probs is not None:
        metrics[KL_ESTIMATE] = kljax.reference_kl(stats.log_prob, batch.ref_log_probs, mask)
        estimates = kljax.estimate_kl(stats.log_prob, batch.ref_log_probs, mask, estimator="k3")
        metrics[largest_of(KL_ESTIMATE)] = largest(estimates, other_log_probs=batch.ref_log_probs)
    if stats.kl is not None:
        forward = kl.loss.direction == "forward"
        metrics["kl_reference_forward" if forward else KL_EXACT] = kljax.WeightedSum.of(stats.kl, mask)
        if not forward:
            metrics[largest_of(KL_EXACT)] = largest(stats.kl, other_log_probs=batch.ref_log_probs)
    if batch.rollout_log_probs is not None:
        recorded = batch.rollout_log_probs
        metrics["rollout_kl"] = kljax.rollout_kl(stats.log_prob, recorded, mask)
        if kl.rollout.coef > 0:
            estimates = kljax.estimate_kl(recorded, stats.log_prob, mask, estimator="k3")
            metrics[ROLLOUT_KL_MAX] = largest(estimates, other_log_probs=recorded)
        if loss.old_log_probs == "trainer":
            # The completions are of this policy, so the error shows how sampler and trainer differ: rounding, or a bug.
            error = jnp.abs(required(batch.old_log_probs) - recorded)
            metrics["rollout_log_prob_error"] = kljax.Extremes.of(error, mask)
    return metrics
