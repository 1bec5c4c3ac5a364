"""The functions that a config selects: advantages, policy loss, controllers, optimizer.

`train.config.algorithms` has the tables of names. No formula is written here: every function is one of kljax, of optax
or of the user. Parameters that are arrays are supplied by their names, others are fields of the config.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import kljax
from train.config import algorithms as tables
from train.config.algorithms import Algorithm
from train.config.kl import ScheduledController
from train.config.loss import Advantage, Loss
from train.config.optim import CosineSchedule, LinearSchedule, Optim, WsdSchedule
from train.config.plan import ADVANTAGE_ARRAYS, LOSS_ARRAYS, Plan, arrays_of
from train.config.signatures import Signature, load_function
from train.rl.metrics import Metrics
from train.rl.user_functions import call_user, check_result
from train.sequences.batch import Batch, place_rewards, required, turn_scores
from train.sequences.token_fields import TURN_IDS

Array = jax.Array
Advantages = tuple[Array, Array | None]
Supply = Mapping[str, Callable[[], Array]]
Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]

RATIO_LEVELS: Mapping[str, str] = {"gspo_loss": "geometric"}
"""The level of the ratio that a loss clips, where no parameter says so."""
CLIPS_NO_RATIO = ("gmpo_loss", "dppo_loss", "rec_loss")
"""Losses whose `clip_low` and `clip_high` bound something else than a ratio of one level, or not always."""

LEVELS = get_args(kljax.typing.Level)


def call_by_name(field: str, signature: Signature, section: Algorithm, arrays: Supply, **others: Any) -> Any:
    """Calls a function with the arrays and the options that its parameters name.

    Args:
      field: of the config, for errors of a function of the user.
      signature: the signature of the function.
      section: the section of the config with its options.
      arrays: array by name, made when it is needed.
      others: arguments that the trainer sets; arguments that the function does not have are dropped.
    """
    supplied = {name: arrays[array]() for name, array in arrays_of(signature, arrays).items()}
    fixed = {name: value for name, value in others.items() if name in signature}
    return call_user(field, section, lambda: load_function(signature.target)(**supplied, **fixed, **section.options()))


def estimate_advantages(plan: Plan, section: Advantage, batch: Batch, shaped: Array | None = None) -> Advantages:
    """Computes the advantages [B, T] of a rollout batch, and the returns that values are fitted to, if there are any.

    Per-row estimators see the reward of each row, also of a row without a trained token, which then counts in its group
    as any other; their advantages are given to all tokens of the row, and of the rows that forked from it. Estimators
    of tokens see the reward where `place_rewards` puts it.

    Args:
      plan: has the signature of the estimator.
      section: has its options.
      batch: has the rewards of the rows.
      shaped: token rewards [B, T] with the KL subtracted; None without a KL in the reward.
    """
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
        "turn_scores": lambda: turn_scores(batch, plan.turns)[0],
        "scored": lambda: turn_scores(batch, plan.turns)[1],
    }
    arrays |= {
        name: functools.partial(_field, batch, field) for name, field in ADVANTAGE_ARRAYS.items() if name not in arrays
    }
    if section.empty_rows == "drop":
        arrays["group_ids"] = lambda: jnp.where(mask.any(-1), _field(batch, "group_ids"), -1)
    assert plan.advantage is not None  # the loss reads advantages
    result = call_by_name("advantage.type", plan.advantage, section, arrays, num_groups=plan.num_groups)
    advantages, returns = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    check_result("advantage.type", section, advantages, (mask.shape[:1], mask.shape))
    if returns is not None:
        check_result("advantage.type", section, returns, (mask.shape,), name="returns")
    if advantages.ndim == 1:
        if batch.episode_rows is not None:
            advantages = jnp.where(batch.episode_rows < 0, 0, advantages[batch.episode_rows])
        advantages = kljax.broadcast_to_tokens(advantages, mask)
    return advantages, returns if plan.value_head else None


def policy_loss(plan: Plan, section: Loss, stats: kljax.TokenStats, batch: Batch, key: Array | None) -> Array:
    """Computes the policy loss [B, T] of a micro-batch whose old log-probs are filled in."""
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
    assert plan.loss is not None
    losses: Array = call_by_name("loss.type", plan.loss, section, arrays, num_groups=plan.num_groups)
    check_result("loss.type", section, losses, (batch.completion_mask.shape,))
    return losses


def _field(batch: Batch, name: str) -> Array:
    return required(getattr(batch, name))


def clip_metric(plan: Plan, section: Loss, stats: kljax.TokenStats, batch: Batch) -> Metrics:
    """Measures the share of tokens that the loss clips, as `clip_fraction`; nothing if it clips no ratio of a level."""
    if plan.loss is None:
        return {}
    options = section.options()
    function = plan.loss.target.rpartition(":")[2]
    level = options.get("level", RATIO_LEVELS.get(function, "token"))
    bounds = {name: options[name] for name in ("clip_low", "clip_high") if name in options}
    known = plan.loss.target == f"kljax:{function}" and function not in CLIPS_NO_RATIO
    if not known or len(bounds) < 2 or min(bounds.values()) < 0 or level not in LEVELS:
        return {}
    old = required(batch.old_log_probs)
    advantages = required(batch.advantages)
    share = kljax.clip_fraction(stats.log_prob, old, advantages, batch.completion_mask, level=level, **bounds)
    return {"clip_fraction": share}


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


def make_optimizer(section: Optim, wrap: Wrap | None = None) -> optax.GradientTransformation:
    """Makes the optimizer on gradients of bounded global norm, at its learning rate; see `chain_optimizer`."""
    return chain_optimizer(section, learning_rate(section), wrap)


def chain_optimizer(
    section: Optim, rate: optax.ScalarOrSchedule, wrap: Wrap | None = None
) -> optax.GradientTransformation:
    """Makes the optimizer of the config at a learning rate, behind the clip of the gradient's norm.

    Args:
      section: the section of the config.
      rate: the learning rate, which need not be that of the section.
      wrap: makes another optimizer of the one behind the clip.
    """
    chosen = section.optimizer
    function = load_function(tables.OPTIMIZERS[chosen.type])
    options = chosen.options()
    if function is optax.contrib.muon:
        options["muon_weight_dimension_numbers"] = _matrices
    optimizer = function(rate, **options)
    return optax.chain(optax.clip_by_global_norm(section.max_grad_norm), optimizer if wrap is None else wrap(optimizer))


def _matrices(params: Any) -> Any:
    """Marks stacked matrices, [layers, in, out] and [layers, experts, in, out], for muon.

    Embeddings, norms, biases, of experts as well, and value head go to Adam.
    """

    def dimensions(path: Any, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        is_matrix = x.ndim > 2 and getattr(path[-1], "key", None) != "bias"
        return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if is_matrix else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


def learning_rate(section: Optim) -> optax.ScalarOrSchedule:
    """Makes the learning rate over the updates: a linear warm-up that starts above 0, then the schedule."""
    highest = section.learning_rate
    then = section.schedule
    after: optax.Schedule | None = None
    if isinstance(then, LinearSchedule):
        after = optax.linear_schedule(highest, highest * then.end, then.decay_steps)
    if isinstance(then, CosineSchedule):
        after = optax.cosine_decay_schedule(highest, then.decay_steps, then.end)
    if isinstance(then, WsdSchedule):
        after = optax.linear_schedule(highest, highest * then.end, then.decay_steps, then.stable_steps)
    if not section.warmup_steps:
        return highest if after is None else after
    rise = optax.linear_schedule(highest / (section.warmup_steps + 1), highest, section.warmup_steps)
    return rise if after is None else optax.join_schedules([rise, after], [section.warmup_steps])


def next_learning_rate(section: Optim, opt_state: optax.OptState) -> Array:
    """Returns the learning rate of the next update, which follows from the updates that were applied."""
    rate = learning_rate(section)
    if not callable(rate):
        return jnp.asarray(rate, jnp.float32)

    def is_schedule(state: Any) -> bool:
        return isinstance(state, optax.ScaleByScheduleState)

    # Parts of the weights may have optimizers of their own, which count alike.
    states = jax.tree.leaves(opt_state, is_leaf=is_schedule)
    return jnp.asarray(rate(next(filter(is_schedule, states)).count), jnp.float32)
