"""The optimizer and the learning rate that a config selects; every function is one of optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from train.config import algorithms as tables
from train.config.optim import CosineSchedule, LinearSchedule, Optim, WsdSchedule
from train.config.signatures import load_function

Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]


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


def next_learning_rate(section: Optim, opt_state: optax.OptState) -> jax.Array:
    """Returns the learning rate of the next update, which follows from the updates that were applied."""
    rate = learning_rate(section)
    if not callable(rate):
        return jnp.asarray(rate, jnp.float32)

    def is_schedule(state: Any) -> bool:
        return isinstance(state, optax.ScaleByScheduleState)

    # Parts of the weights may have optimizers of their own, which count alike.
    states = jax.tree.leaves(opt_state, is_leaf=is_schedule)
    return jnp.asarray(rate(next(filter(is_schedule, states)).count), jnp.float32)
