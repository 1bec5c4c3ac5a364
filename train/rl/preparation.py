"""The part of the objective that needs a whole rollout batch: rewards, advantages, corrections and controllers.

No formula is written here: every term is a call of kljax.
"""

import dataclasses
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

import kljax
from kljax.typing import Estimator
from train.config.kl import RewardKL
from train.config.plan import Plan
from train.rl.algorithms import make_controllers, make_estimator
from train.rl.correction import make_correction
from train.rl.metrics import Metrics, single
from train.rl.state import keep_unless
from train.rl.terms import make_token_weights
from train.sequences.batch import Batch, place_rewards, required

Array = jax.Array
Controllers = dict[str, kljax.ControllerState]
Preparation = Callable[[Batch, Controllers], tuple[Batch, Controllers, Metrics]]
Control = Callable[[Controllers, Metrics, Array], Controllers]


def make_preparation(plan: Plan) -> Preparation:
    """Makes `(batch, controller states) -> (batch, controller states, metrics)`, which adds constants to the batch.

    They are advantages, returns and corrections; a loss that reads no advantages has none. Every mean is over the whole
    rollout batch. The logged reference KL is never scaled or shifted. The controller of the loss is updated after the
    updates, by `make_control`. Corrections see the trainer's log-probs, also where the loss takes log-probs of the
    sampler for the old ones.
    """
    controllers = make_controllers(plan)
    estimate = None if plan.advantage is None else make_estimator(plan)
    weights_of = make_token_weights(plan)
    correct = make_correction(plan)
    loss = plan.config.loss
    section = plan.config.kl
    options = plan.config.advantage
    in_groups = plan.config.rollout.samples_per_prompt > 1

    def with_advantages(batch: Batch, states: Controllers) -> tuple[Batch, Controllers, Metrics]:
        metrics: Metrics = {}
        mask = batch.completion_mask
        next_states = dict(states)

        shaped = None
        if "reward" in controllers:
            coef = states["reward"].coef
            shaped, kl = _kl_shaped(plan, section.reward, batch, coef)
            metrics["kl_reward"] = kljax.WeightedSum.of(kl, mask)
            metrics["kl_coef"] = single(coef)
            next_states["reward"] = _steer(controllers["reward"], states["reward"], metrics["kl_reward"].value(), mask)
        if estimate is None:
            return batch, next_states, metrics
        advantages, returns = estimate(batch, shaped)
        if options.zeros == "drop":
            batch = dataclasses.replace(batch, kept_mask=batch.kept() & (advantages != 0))
        if options.scale_by_mean:
            weights = weights_of(batch)
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
            next_states["advantage"] = _steer(controllers["advantage"], states["advantage"], mean_kl, mask)
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
    controllers = make_controllers(plan)

    def control(states: Controllers, measured: Metrics, mask: Array) -> Controllers:
        next_states = dict(states)
        for name, metric in measured.items():
            next_states[name] = _steer(controllers[name], states[name], metric.value(), mask)
        return next_states

    return control


def _steer(
    controller: kljax.Controller, state: kljax.ControllerState, measured: Array, mask: Array
) -> kljax.ControllerState:
    """Updates a controller by its metric; one that is not finite leaves its state."""
    return keep_unless(jnp.isfinite(measured), controller.update(state, measured, mask.any(-1).sum()), state)


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
