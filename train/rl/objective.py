"""The one place that composes a loss.

`make_preparation` turns a scored rollout batch into advantages, which are treated as constants; `make_objective` turns
a micro-batch of it into a scalar. No formula is written here: every term is a call of kljax.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

import kljax
from kljax.typing import Estimator
from train.config.schema import Config
from train.models import Decoder
from train.rl import algorithms
from train.rl.batch import Batch, required
from train.rl.layout import Layout
from train.rl.metrics import Metrics
from train.rl.policy import token_stats, token_values
from train.rl.state import policy_of

Array = jax.Array
Tree = Any
Coefficients = dict[str, Array]
Preparation = Callable[[Batch, kljax.ControllerState], tuple[Batch, kljax.ControllerState, Metrics]]
Objective = Callable[[dict[str, Tree], Tree, Batch, Coefficients, Array | None], tuple[Array, "LossMetrics"]]


class LossMetrics(NamedTuple):
    """The metrics of one micro-batch, detached.

    Attributes:
      parts: the loss and each of its terms, scalars that add up over the micro-batches of an update.
      tokens: statistics of the tokens.
    """

    parts: dict[str, Array]
    tokens: Metrics

    def reduce(self) -> "LossMetrics":
        """Merges the micro-batches that lie along the leading axis."""
        parts = {name: value.sum(0) for name, value in self.parts.items()}
        return LossMetrics(parts, {name: metric.reduce() for name, metric in self.tokens.items()})

    def of_update(self) -> Metrics:
        """Returns the metrics of a whole update, whose parts have been summed."""
        parts = {name: kljax.WeightedSum(value, jnp.ones_like(value)) for name, value in self.parts.items()}
        return {**parts, **self.tokens}


def tile(config: Config) -> kljax.Tile | None:
    """Returns the tile size of the chunked LM head; None leaves it to the library."""
    section = config.log_probs.tile
    return None if section is None else kljax.Tile(section.tokens, section.vocab)


def coefficients(config: Config) -> Coefficients:
    """Returns the coefficients of the loss terms as arrays, so that changing one does not recompile.

    The set of terms is static: a term whose coefficient is 0 in the config is not computed.
    """
    values = {
        "kl_loss": config.kl.loss.coef,
        "rollout_kl": config.kl.rollout.coef,
        "entropy": config.loss.entropy_coef,
        "value": config.loss.value_coef,
    }
    return {name: jnp.float32(value) for name, value in values.items()}


def token_weights(config: Config, batch: Batch) -> Array:
    """Computes the token weights of one optimizer batch, before it is split into micro-batches."""
    prompts = config.loss.aggregation == "prompt_mean"
    return kljax.token_weights(
        batch.completion_mask,
        mode=config.loss.aggregation,
        max_length=config.loss.max_length,
        group_ids=batch.group_ids if prompts else None,
        num_groups=config.rollout.prompts_per_step if prompts else None,
        empty_rows=config.loss.empty_rows,
    )


def required_fields(config: Config) -> list[str]:
    """Lists the optional fields of the batch that the objective reads."""
    needs = {
        "rewards": True,
        "group_ids": True,
        "old_log_probs": config.needs_old_log_probs(),
        "rollout_log_probs": config.needs_rollout_log_probs(),
        "ref_log_probs": config.needs_ref_log_probs(),
        "ref_hidden": config.exact_loss(),
        "ref_exact_kl": config.exact_reward(),
        "values": config.has_value_head(),
    }
    return [name for name, needed in needs.items() if needed]


def make_preparation(config: Config) -> Preparation:
    """Makes `(batch, controller state) -> (batch, controller state, metrics)`, which adds advantages and returns.

    Every mean is over the whole rollout batch. The logged reference KL is never scaled or shifted. Without a policy
    loss there are no advantages.
    """
    estimate = algorithms.ADVANTAGES[config.advantage.estimator](config)
    controller, section = algorithms.make_controller(config), config.kl

    def prepare(batch: Batch, state: kljax.ControllerState) -> tuple[Batch, kljax.ControllerState, Metrics]:
        metrics: Metrics = {}
        mask = batch.completion_mask
        token_rewards, next_state = kljax.place_rewards(required(batch.rewards), mask), state
        if section.reward.coef > 0:
            token_rewards, kl = _kl_shaped(config, batch, state.coef)
            metrics["kl_reward"] = kljax.WeightedSum.of(kl, mask)
            metrics["kl_coef"] = kljax.WeightedSum(state.coef, jnp.ones_like(state.coef))
            next_state = controller.update(state, metrics["kl_reward"].value(), mask.any(-1).sum())
        if config.loss.policy == "none":
            return batch, next_state, metrics
        advantages, returns = estimate(token_rewards, batch)
        if config.advantage.whiten:
            advantages = kljax.masked_whiten(advantages, mask)
        if section.advantage.coef > 0:
            advantages, mean_kl = kljax.centered_kl_advantages(
                advantages,
                required(batch.old_log_probs),
                required(batch.ref_log_probs),
                mask,
                coef=section.advantage.coef,
                estimator=section.advantage.estimator,
            )
            metrics["kl_advantage"] = kljax.WeightedSum(mean_kl, jnp.ones_like(mean_kl))
        return dataclasses.replace(batch, advantages=advantages, returns=returns), next_state, metrics

    return prepare


def _kl_shaped(config: Config, batch: Batch, coef: Array) -> tuple[Array, Array]:
    """Subtracts the KL from the token rewards, and returns both."""
    section, mask, rewards = config.kl.reward, batch.completion_mask, required(batch.rewards)
    if config.exact_reward():
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


def make_objective(config: Config, model: Decoder) -> Objective:
    """Makes the loss of one micro-batch, `sum_t weight_t * (policy + sum_k coef_k * term_k)_t`, with its metrics.

    The signature is `objective(trainable, base, batch, coefficients, ref_head)`; `ref_head` comes from
    `reference_head`, for the exact KL. Gradient: to `trainable` only. Metrics are treated as constants.
    """
    layout = Layout.of(config)
    policy_loss = algorithms.policy_loss(config)

    def objective(
        trainable: dict[str, Tree], base: Tree, batch: Batch, coefs: Coefficients, ref_head: Array | None = None
    ) -> tuple[Array, LossMetrics]:
        mask, weights = batch.completion_mask, required(batch.token_weights)
        stats, hidden = token_stats(
            model,
            policy_of(trainable, base),
            batch.tokens,
            batch.token_mask,
            temperature=config.temperature,
            mask=mask,
            entropy=True if config.loss.entropy_coef > 0 else "constant",
            reference=_exact_reference(config, batch, ref_head),
            tile=tile(config),
            layout=layout,
        )
        batch = _with_old_log_probs(batch, stats)
        terms: dict[str, Array] = {}
        scale: dict[str, Array] = {}
        if policy_loss is not None:
            advantages = required(batch.advantages)
            terms["policy"] = policy_loss(stats.log_prob, required(batch.old_log_probs), advantages, mask)
            scale["policy"] = jnp.float32(1)
        if config.kl.loss.coef > 0:
            terms["kl"], scale["kl"] = _reference_kl(config, stats, batch), coefs["kl_loss"]
        if config.kl.rollout.coef > 0:
            terms["rollout_kl"] = kljax.rollout_kl_loss(
                stats.log_prob, required(batch.rollout_log_probs), mask, estimator=config.kl.rollout.estimator
            )
            scale["rollout_kl"] = coefs["rollout_kl"]
        if config.loss.entropy_coef > 0:
            terms["entropy"], scale["entropy"] = required(stats.entropy), -coefs["entropy"]
        if config.has_value_head():
            values = token_values(trainable["value_head"], hidden)
            terms["value"] = kljax.value_loss(
                values, required(batch.values), required(batch.returns), mask, clip=config.loss.value_clip
            )
            scale["value"] = coefs["value"]
        reduced = {name: (kljax.masked(term, mask) * weights).sum() for name, term in terms.items()}
        loss = sum((scale[name] * value for name, value in reduced.items()), jnp.float32(0))
        parts = {"loss": loss, **{f"{name}_loss": value for name, value in reduced.items() if name != "entropy"}}
        return loss, LossMetrics(jax.lax.stop_gradient(parts), _token_metrics(config, stats, batch))

    return objective


def _with_old_log_probs(batch: Batch, stats: kljax.TokenStats) -> Batch:
    """Fills in old log-probs that were not scored: this update is the first, so they are its own."""
    if batch.old_log_probs is not None:
        return batch
    return dataclasses.replace(batch, old_log_probs=jax.lax.stop_gradient(stats.log_prob))


def _exact_reference(config: Config, batch: Batch, ref_head: Array | None) -> kljax.ReferenceStates | None:
    """Returns the reference of the loss's exact KL, or None without one."""
    if not config.exact_loss():
        return None
    if ref_head is None and not config.shares_head():
        raise ValueError("ref_head: got None, expected the head of the reference, which is not the policy's")
    return kljax.ReferenceStates(required(batch.ref_hidden), ref_head, config.kl.loss.direction)


def _reference_kl(config: Config, stats: kljax.TokenStats, batch: Batch) -> Array:
    section = config.kl.loss
    if config.exact_loss():
        return required(stats.kl)
    return kljax.reference_kl_loss(
        stats.log_prob,
        required(batch.ref_log_probs),
        batch.completion_mask,
        estimator=cast(Estimator, section.estimator),
        gradient=section.gradient,
        sampling_log_probs=required(batch.old_log_probs) if section.importance_corrected else None,
        max_ratio=section.max_ratio,
        value_clip=section.value_clip,
    )


def _token_metrics(config: Config, stats: kljax.TokenStats, batch: Batch) -> Metrics:
    mask = batch.completion_mask
    metrics: Metrics = {
        "entropy": kljax.WeightedSum.of(required(stats.entropy), mask),
        "ppo_kl": kljax.ppo_kl(stats.log_prob, required(batch.old_log_probs), mask),
    }
    if config.loss.policy != "none":
        metrics["clip_fraction"] = kljax.clip_fraction(
            stats.log_prob,
            required(batch.old_log_probs),
            required(batch.advantages),
            mask,
            clip_low=config.loss.clip_low,
            clip_high=config.loss.clip_high,
            level="geometric" if config.loss.policy == "gspo" else "token",
        )
    if batch.ref_log_probs is not None:
        metrics["kl_reference"] = kljax.reference_kl(stats.log_prob, required(batch.ref_log_probs), mask)
    if stats.kl is not None:
        forward = config.kl.loss.direction == "forward"
        metrics["kl_reference_forward" if forward else "kl_reference_exact"] = kljax.WeightedSum.of(stats.kl, mask)
    if batch.rollout_log_probs is not None:
        metrics["rollout_kl"] = kljax.rollout_kl(stats.log_prob, required(batch.rollout_log_probs), mask)
        # The completions are of this policy, so the error shows how sampler and trainer differ: rounding, or a bug.
        error = jnp.abs(required(batch.old_log_probs) - batch.rollout_log_probs)
        metrics["rollout_log_prob_error"] = kljax.Extremes.of(error, mask)
    return metrics
