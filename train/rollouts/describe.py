"""The shapes of a rollout batch, for programs that are compiled without one."""

from typing import Any

import jax
import jax.numpy as jnp

from train.context import RunContext
from train.models.sharding import batch_sharding
from train.rollouts.jax_source import rollout_sampling
from train.rollouts.lag import reads_lags
from train.rollouts.routes import records_routes
from train.rollouts.sampler.draw import describe_draws
from train.sequences.batch import Batch
from train.sequences.token_fields import LAGS, ROUTES, TOKEN_FIELDS, TOKEN_REWARDS, TURN_IDS, TURN_SCORES


def describe_batch(context: RunContext) -> Batch:
    """Describes the batch that `draw` takes from the source of a run, by shapes, types and shardings."""
    config = context.config
    rows = config.rows_per_batch()
    length = config.data.row_length()

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=batch_sharding(context.mesh))

    draws = describe_draws(rollout_sampling(config), context.model.config.vocab_size)
    fields = {name: x for name, x in draws.items() if name in TOKEN_FIELDS and TOKEN_FIELDS[name].recorded}
    log_probs = fields.pop("rollout_log_probs")
    if records_routes(context):
        fields[ROUTES] = jax.ShapeDtypeStruct((1, *context.model.config.route_shape), jnp.int16)
    if reads_lags(context.plan):
        fields[LAGS] = jax.ShapeDtypeStruct((1,), jnp.int32)
    of_turns: tuple[str, ...] = ()
    if config.environment is not None:
        # Of text steps; tools, which give no rewards of turns, need less.
        of_turns = (TOKEN_REWARDS, *((TURN_IDS, TURN_SCORES) if context.plan.turns else ()))
    fields |= {name: jax.ShapeDtypeStruct((1,), TOKEN_FIELDS[name].dtype) for name in of_turns}
    return Batch(
        tokens=array(jnp.int32, length),
        token_mask=array(jnp.bool, length),
        completion_mask=array(jnp.bool, length),
        prompt_lengths=array(jnp.int32),
        group_ids=array(jnp.int32),
        episode_rows=array(jnp.int32) if config.rollout.fork_rows else None,
        rollout_log_probs=array(log_probs.dtype, length) if config.rollout.record_log_probs else None,
        fields={name: array(x.dtype, length, *x.shape[1:]) for name, x in fields.items()},
    )
