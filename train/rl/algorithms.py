"""The functions that a config selects: advantages, policy loss, controllers.

`train.config.algorithms` has the tables of names. No formula is written here: every function is one of kljax or of the
user. Parameters that are arrays are supplied by their names, others are fields of the config.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from train.config import algorithms as tables
from train.config.kl import ScheduledController
from train.config.plan import ADVANTAGE_ARRAYS, LOSS_ARRAYS, Plan
from train.config.signatures import load_function
from train.rl.functions import ChosenFunction
from train.sequences.batch import Batch, place_rewards, required, turn_scores
from train.sequences.token_fields import TURN_IDS

Array = jax.Array
Advantages = tuple[Array, Array | None]
Estimate = Callable[..., Advantages]
PolicyLoss = Callable[[kljax.TokenStats, Batch, Array | None], Array]


def make_estimator(plan: Plan) -> Estimate:
    """Makes `(batch, shaped=None) -> (advantages [B, T], returns or None)`, for a rollout batch.

    Per-row estimators see the reward of each row, also of a row without a trained token, which then counts in its group
    as any other; their advantages are given to all tokens of the row, and of the rows that forked from it. Estimators
    of tokens see the reward where `place_rewards` puts it, or `shaped`: token rewards [B, T] with the KL subtracted.
    Returns are what values are fitted to.
    """
    assert plan.advantage is not None
    section = plan.config.advantage
    function = ChosenFunction("advantage.type", plan.advantage, section)
    num_groups = plan.num_groups
    turns = plan.turns
    has_values = plan.value_head

    def estimate(batch: Batch, shaped: Array | None = None) -> Advantages:
        mask = batch.completion_mask
        rewards = required(batch.rewards)
        arrays: dict[str, Callable[[], Array]] = {"mask": lambda: mask}
        if shaped is None:
            arrays["rewards"] = lambda: rewards
            arrays["token_rewards"] = lambda: place_rewards(batch)
        else:
            # A row without a token has no KL.
            arrays["rewards"] = lambda: jnp.where(mask.any(-1), kljax.masked_sum(shaped, mask, axis=-1), rewards)
            arrays["token_rewards"] = lambda: shaped
        arrays |= {
            "turn_ids": lambda: required(batch.fields.get(TURN_IDS)),
            "turn_scores": lambda: turn_scores(batch, turns)[0],
            "scored": lambda: turn_scores(batch, turns)[1],
        }
        arrays |= {
            name: functools.partial(_field, batch, field)
            for name, field in ADVANTAGE_ARRAYS.items()
            if name not in arrays
        }
        if section.empty_rows == "drop":
            arrays["group_ids"] = lambda: jnp.where(mask.any(-1), _field(batch, "group_ids"), -1)
        result = function.call(arrays, num_groups=num_groups)
        advantages, returns = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        function.check(advantages, (mask.shape[:1], mask.shape))
        if returns is not None:
            function.check(returns, (mask.shape,), name="returns")
        if advantages.ndim == 1:
            if batch.episode_rows is not None:
                advantages = jnp.where(batch.episode_rows < 0, 0, advantages[batch.episode_rows])
            advantages = kljax.broadcast_to_tokens(advantages, mask)
        return advantages, returns if has_values else None

    return estimate


def make_policy_loss(plan: Plan) -> PolicyLoss:
    """Makes `(statistics, batch, key) -> [B, T]`: the policy loss of a micro-batch that has its old log-probs."""
    assert plan.loss is not None
    function = ChosenFunction("loss.type", plan.loss, plan.config.loss)
    num_groups = plan.num_groups

    def policy_loss(stats: kljax.TokenStats, batch: Batch, key: Array | None) -> Array:
        computed: dict[str, Callable[[], Array]] = {
            "log_probs": lambda: stats.log_prob,
            "entropies": lambda: required(stats.entropy),
            "mask": lambda: batch.completion_mask,
            "key": lambda: required(key),
        }
        arrays = computed | {
            name: functools.partial(_field, batch, field or name)
            for name, field in LOSS_ARRAYS.items()
            if name not in computed
        }
        losses: Array = function.call(arrays, num_groups=num_groups)
        function.check(losses, (batch.completion_mask.shape,))
        return losses

    return policy_loss


def _field(batch: Batch, name: str) -> Array:
    return required(getattr(batch, name))


def make_controllers(plan: Plan) -> dict[str, kljax.Controller]:
    """Makes the controllers of the KL coefficients in use, by placement, and of the entropy coefficient."""
    kl = plan.config.kl
    loss = plan.config.loss
    made = {name: _controller(getattr(kl, name)) for name in plan.controllers if name != "entropy"}
    if "entropy" in plan.controllers:
        function = load_function(tables.ENTROPY_CONTROLLERS[loss.entropy_controller.type])
        made["entropy"] = function(loss.entropy_coef, **loss.entropy_controller.options())
    return made


def _controller(term: Any) -> kljax.Controller:
    section = term.controller
    function = load_function(tables.CONTROLLERS[section.type])
    if not isinstance(section, ScheduledController):
        return function(term.coef, **section.options())
    schedule = load_function(tables.KL_SCHEDULES[section.schedule.type])
    return function(schedule(term.coef, **section.schedule.options()))
