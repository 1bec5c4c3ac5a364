"""The one place that maps a name of the config to a function of the library, and the one that composes a loss.

Two halves: `make_preparation` turns a scored rollout batch into advantages (data, no gradient), `make_objective` turns
a micro-batch of the prepared one into a scalar. No formula is written here; every term is a call of kljax.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

import kljax
from kljax.typing import Estimator
from train.config.schema import Config
from train.models import Decoder
from train.rl.batch import Batch, given
from train.rl.metrics import Metrics
from train.rl.policy import Reference, token_stats, token_values
from train.rl.state import policy_of

Array = jax.Array
Tree = Any
Coefficients = dict[str, Array]
Advantages = tuple[Array, Array | None]
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


def make_controller(config: Config) -> kljax.Controller:
    """The controller of the coefficient of the KL in the reward."""
    reward = config.kl.reward
    if reward.controller.type == "fixed":
        return kljax.fixed_kl(reward.coef)
    return kljax.adaptive_kl(reward.coef, target=reward.controller.target, horizon=reward.controller.horizon)


def tile(config: Config) -> kljax.Tile | None:
    """How much of the logits exists at a time; None leaves it to the library."""
    section = config.log_probs.tile
    return None if section is None else kljax.Tile(section.tokens, section.vocab)


def coefficients(config: Config) -> Coefficients:
    """The coefficients of the loss terms, as arrays: changing one does not compile anything again.

    Which terms there are is part of the program: one whose coefficient is 0 in the config is not computed, nor the
    gradient of the entropy.
    """
    values = {
        "kl_loss": config.kl.loss.coef,
        "rollout_kl": config.kl.rollout.coef,
        "entropy": config.loss.entropy_coef,
        "value": config.loss.value_coef,
    }
    return {name: jnp.float32(value) for name, value in values.items()}


def token_weights(config: Config, batch: Batch) -> Array:
    """The weights of all tokens of one optimizer batch; computed before it is split into micro-batches."""
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
    """The optional fields of the batch that the objective of this config reads."""
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


def _group(config: Config, function: Callable[..., Array], **options: Any) -> Callable[..., Advantages]:
    """An estimator over the completions of one prompt, from the summed rewards of each row."""

    def estimate(token_rewards: Array, batch: Batch) -> Advantages:
        rewards = kljax.masked_sum(token_rewards, batch.completion_mask, axis=-1)
        groups = {"num_groups": config.rollout.prompts_per_step, **options}
        per_row = function(rewards, batch, groups)
        return kljax.broadcast_to_tokens(per_row, batch.completion_mask), None

    return estimate


def _grpo(config: Config) -> Callable[..., Advantages]:
    return _group(config, lambda r, b, o: kljax.grpo_advantages(r, b.group_ids, **o), scale=config.advantage.scale)


def _rloo(config: Config) -> Callable[..., Advantages]:
    return _group(config, lambda r, b, o: kljax.rloo_advantages(r, b.group_ids, **o))


def _opo(config: Config) -> Callable[..., Advantages]:
    return _group(config, lambda r, b, o: kljax.opo_advantages(r, b.group_ids, b.completion_mask, **o))


def _reinforce_plus_plus_baseline(config: Config) -> Callable[..., Advantages]:
    return _group(config, lambda r, b, o: kljax.reinforce_plus_plus_baseline_advantages(r, b.group_ids, **o))


def _reinforce_plus_plus(config: Config) -> Callable[..., Advantages]:
    def estimate(token_rewards: Array, batch: Batch) -> Advantages:
        returns = kljax.reinforce_plus_plus_returns(token_rewards, batch.completion_mask, gamma=config.advantage.gamma)
        return returns, None

    return estimate


def _gae(config: Config) -> Callable[..., Advantages]:
    def estimate(token_rewards: Array, batch: Batch) -> Advantages:
        section, values = config.advantage, given(batch.values)
        return kljax.gae(token_rewards, values, batch.completion_mask, gamma=section.gamma, lam=section.lam)

    return estimate


ADVANTAGES: Mapping[str, Callable[[Config], Callable[..., Advantages]]] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "opo": _opo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "gae": _gae,
}

POLICY_LOSSES: Mapping[str, Callable[..., Array]] = {
    "ppo": kljax.ppo_clip_loss,
    "cispo": kljax.cispo_loss,
    "gspo": kljax.gspo_loss,
}


def make_preparation(config: Config) -> Preparation:
    """From a scored rollout batch to advantages, returns and the next state of the KL controller.

    Without a policy loss nothing reads advantages, and there are none.

    Every mean is over the whole rollout batch. The reference KL that is logged is never the array that was scaled or
    shifted.
    """
    estimate = ADVANTAGES[config.advantage.estimator](config)
    controller, section = make_controller(config), config.kl

    def prepare(batch: Batch, state: kljax.ControllerState) -> tuple[Batch, kljax.ControllerState, Metrics]:
        metrics: Metrics = {}
        mask = batch.completion_mask
        token_rewards, next_state = kljax.place_rewards(given(batch.rewards), mask), state
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
                given(batch.old_log_probs),
                given(batch.ref_log_probs),
                mask,
                coef=section.advantage.coef,
                estimator=section.advantage.estimator,
            )
            metrics["kl_advantage"] = kljax.WeightedSum(mean_kl, jnp.ones_like(mean_kl))
        return dataclasses.replace(batch, advantages=advantages, returns=returns), next_state, metrics

    return prepare


def _kl_shaped(config: Config, batch: Batch, coef: Array) -> tuple[Array, Array]:
    """Subtracts the KL from the token rewards, and returns both."""
    section, mask, rewards = config.kl.reward, batch.completion_mask, given(batch.rewards)
    if config.exact_reward():
        kl = kljax.masked(given(batch.ref_exact_kl), mask)
        return kljax.subtract_kl(rewards, kl, mask, coef=coef), kl
    return kljax.kl_shaped_rewards(
        rewards,
        given(batch.old_log_probs),
        given(batch.ref_log_probs),
        mask,
        coef=coef,
        estimator=cast(Estimator, section.estimator),
        value_clip=section.value_clip,
    )


def make_objective(config: Config, model: Decoder) -> Objective:
    """The loss of one micro-batch: `sum_t weight_t * (policy + coef_k * term_k)_t`, and its metrics.

    `objective(trainable, base, batch, coefficients, ref_head)`; the last is what `reference_head` returns, and is read
    by the exact KL. Gradient: to `trainable` alone. The metrics are detached.
    """
    policy_loss = _policy_loss(config)

    def objective(
        trainable: dict[str, Tree], base: Tree, batch: Batch, coefs: Coefficients, ref_head: Array | None = None
    ) -> tuple[Array, LossMetrics]:
        mask, weights = batch.completion_mask, given(batch.token_weights)
        stats, hidden = token_stats(
            model,
            policy_of(trainable, base),
            batch.tokens,
            batch.token_mask,
            temperature=config.temperature,
            mask=mask,
            entropy=True,
            entropy_gradient=config.loss.entropy_coef > 0,
            reference=_exact_reference(config, batch, ref_head),
            direction=config.kl.loss.direction,
            tile=tile(config),
            first=config.data.max_prompt_length,
            group=config.shared_rows(),
        )
        batch = _with_old_log_probs(batch, stats)
        terms: dict[str, Array] = {}
        scale: dict[str, Array] = {}
        if policy_loss is not None:
            advantages = given(batch.advantages)
            terms["policy"] = policy_loss(stats.log_prob, given(batch.old_log_probs), advantages, mask)
            scale["policy"] = jnp.float32(1)
        if config.kl.loss.coef > 0:
            terms["kl"], scale["kl"] = _reference_kl(config, stats, batch), coefs["kl_loss"]
        if config.kl.rollout.coef > 0:
            terms["rollout_kl"] = kljax.rollout_kl_loss(
                stats.log_prob, given(batch.rollout_log_probs), mask, estimator=config.kl.rollout.estimator
            )
            scale["rollout_kl"] = coefs["rollout_kl"]
        if config.loss.entropy_coef > 0:
            terms["entropy"], scale["entropy"] = given(stats.entropy), -coefs["entropy"]
        if config.has_value_head():
            values = token_values(trainable["value_head"], hidden)
            terms["value"] = kljax.value_loss(
                values, given(batch.values), given(batch.returns), mask, clip=config.loss.value_clip
            )
            scale["value"] = coefs["value"]
        reduced = {name: (kljax.masked(term, mask) * weights).sum() for name, term in terms.items()}
        loss = sum((scale[name] * value for name, value in reduced.items()), jnp.float32(0))
        parts = {"loss": loss, **{f"{name}_loss": value for name, value in reduced.items() if name != "entropy"}}
        return loss, LossMetrics(jax.lax.stop_gradient(parts), _token_metrics(config, stats, batch))

    return objective


def _with_old_log_probs(batch: Batch, stats: kljax.TokenStats) -> Batch:
    """The batch with the log-probs of the policy before its updates: where they were not scored, this is the one."""
    if batch.old_log_probs is not None:
        return batch
    return dataclasses.replace(batch, old_log_probs=jax.lax.stop_gradient(stats.log_prob))


def _policy_loss(config: Config) -> Callable[..., Array] | None:
    """The policy loss of the config; None for distillation, which has none."""
    section = config.loss
    if section.policy == "none":
        return None
    options: dict[str, Any] = {"clip_low": section.clip_low, "clip_high": section.clip_high}
    if section.policy == "ppo":
        options["dual_clip"] = section.dual_clip
    function = POLICY_LOSSES[section.policy]
    return lambda log_probs, old, advantages, mask: function(log_probs, old, advantages, mask, **options)


def _exact_reference(config: Config, batch: Batch, ref_head: Array | None) -> Reference | None:
    """What the exact KL of the loss is measured against, or None without one."""
    if not config.exact_loss():
        return None
    if ref_head is None and not config.shares_head():
        raise ValueError("ref_head: got None, expected the head of the reference, which is not the policy's")
    return given(batch.ref_hidden), ref_head


def _reference_kl(config: Config, stats: kljax.TokenStats, batch: Batch) -> Array:
    section = config.kl.loss
    if config.exact_loss():
        return given(stats.kl)
    return kljax.reference_kl_loss(
        stats.log_prob,
        given(batch.ref_log_probs),
        batch.completion_mask,
        estimator=cast(Estimator, section.estimator),
        gradient=section.gradient,
        sampling_log_probs=given(batch.old_log_probs) if section.importance_corrected else None,
        max_ratio=section.max_ratio,
        value_clip=section.value_clip,
    )


def _token_metrics(config: Config, stats: kljax.TokenStats, batch: Batch) -> Metrics:
    mask = batch.completion_mask
    metrics: Metrics = {
        "entropy": kljax.WeightedSum.of(given(stats.entropy), mask),
        "ppo_kl": kljax.ppo_kl(stats.log_prob, given(batch.old_log_probs), mask),
    }
    if config.loss.policy != "none":
        metrics["clip_fraction"] = kljax.clip_fraction(
            stats.log_prob,
            given(batch.old_log_probs),
            given(batch.advantages),
            mask,
            clip_low=config.loss.clip_low,
            clip_high=config.loss.clip_high,
            level="geometric" if config.loss.policy == "gspo" else "token",
        )
    if batch.ref_log_probs is not None:
        metrics["kl_reference"] = kljax.reference_kl(stats.log_prob, given(batch.ref_log_probs), mask)
    if stats.kl is not None:
        forward = config.kl.loss.direction == "forward"
        metrics["kl_reference_forward" if forward else "kl_reference_exact"] = kljax.WeightedSum.of(stats.kl, mask)
    if batch.rollout_log_probs is not None:
        metrics["rollout_kl"] = kljax.rollout_kl(stats.log_prob, given(batch.rollout_log_probs), mask)
        # For completions of that very policy: what sampler and trainer compute differently, rounding or a mistake.
        error = jnp.abs(given(batch.old_log_probs) - batch.rollout_log_probs)
        metrics["rollout_log_prob_error"] = kljax.Extremes.of(error, mask)
    return metrics
