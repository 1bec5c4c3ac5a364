"""The names of a config and the functions they select: advantages, policy losses, controllers, the optimizer.

A name is looked up here and nowhere else. No formula is written here: every entry is a call of kljax or optax.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

import kljax
from train.config.schema import Config, Optim
from train.rl.batch import Batch, required

Array = jax.Array
Advantages = tuple[Array, Array | None]
Estimate = Callable[[Array, Batch], Advantages]


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


def make_controller(config: Config) -> kljax.Controller:
    """Makes the controller of the coefficient of the KL in the reward."""
    reward = config.kl.reward
    if reward.controller.type == "fixed":
        return kljax.fixed_kl(reward.coef)
    return kljax.adaptive_kl(reward.coef, target=reward.controller.target, horizon=reward.controller.horizon)


def _group(config: Config, function: Callable[..., Array], **options: Any) -> Estimate:
    """Makes an estimator over the completions of each prompt, from the summed rewards of each row."""

    def estimate(token_rewards: Array, batch: Batch) -> Advantages:
        rewards = kljax.masked_sum(token_rewards, batch.completion_mask, axis=-1)
        groups = {"num_groups": config.rollout.prompts_per_step, **options}
        per_row = function(rewards, batch, groups)
        return kljax.broadcast_to_tokens(per_row, batch.completion_mask), None

    return estimate


def _grpo(config: Config) -> Estimate:
    return _group(config, lambda r, b, o: kljax.grpo_advantages(r, b.group_ids, **o), scale=config.advantage.scale)


def _rloo(config: Config) -> Estimate:
    return _group(config, lambda r, b, o: kljax.rloo_advantages(r, b.group_ids, **o))


def _opo(config: Config) -> Estimate:
    return _group(config, lambda r, b, o: kljax.opo_advantages(r, b.group_ids, b.completion_mask, **o))


def _reinforce_plus_plus_baseline(config: Config) -> Estimate:
    return _group(config, lambda r, b, o: kljax.reinforce_plus_plus_baseline_advantages(r, b.group_ids, **o))


def _reinforce_plus_plus(config: Config) -> Estimate:
    def estimate(token_rewards: Array, batch: Batch) -> Advantages:
        returns = kljax.reinforce_plus_plus_returns(token_rewards, batch.completion_mask, gamma=config.advantage.gamma)
        return returns, None

    return estimate


def _gae(config: Config) -> Estimate:
    def estimate(token_rewards: Array, batch: Batch) -> Advantages:
        section, values = config.advantage, required(batch.values)
        return kljax.gae(token_rewards, values, batch.completion_mask, gamma=section.gamma, lam=section.lam)

    return estimate


ADVANTAGES: Mapping[str, Callable[[Config], Estimate]] = {
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


def policy_loss(config: Config) -> Callable[..., Array] | None:
    """Returns `(log_probs, old_log_probs, advantages, mask) -> [B, T]`, or None for distillation."""
    section = config.loss
    if section.policy == "none":
        return None
    options: dict[str, Any] = {"clip_low": section.clip_low, "clip_high": section.clip_high}
    if section.policy == "ppo":
        options["dual_clip"] = section.dual_clip
    function = POLICY_LOSSES[section.policy]
    return lambda log_probs, old, advantages, mask: function(log_probs, old, advantages, mask, **options)
