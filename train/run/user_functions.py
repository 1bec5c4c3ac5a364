"""Functions of the user in the objective, traced before a run: no weight is loaded and nothing is compiled."""

from typing import Any

import jax
import jax.numpy as jnp

import kljax
from train.config.algorithms import UserFunction
from train.config.plan import Plan
from train.rl.algorithms import make_estimator, make_policy_loss
from train.rl.correction import make_correction
from train.sequences.batch import Batch
from train.sequences.token_fields import LAGS, TURN_IDS, TURN_SCORES


def check_user_functions(plan: Plan) -> None:
    """Traces the loss, the advantage and the corrections of the user with the shapes of a run.

    Raises:
      UserError: one fails or returns another type or shape; names the field and the function.
    """
    config = plan.config
    rows = config.rows_per_batch()
    length = config.data.row_length()
    batch = _abstract_batch(rows, length)
    if plan.advantage is not None and isinstance(config.advantage, UserFunction):
        jax.eval_shape(make_estimator(plan), batch)
    if any(isinstance(entry, UserFunction) for entry in config.correction):
        jax.eval_shape(make_correction(plan), batch)
    if plan.loss is not None and isinstance(config.loss, UserFunction):
        # The function sees the rows of a micro-batch.
        rows = config.rows_per_micro_batch()
        stats = kljax.TokenStats(_array(rows, length), _array(rows, length))
        key = jax.eval_shape(jax.random.key, 0) if plan.key else None
        jax.eval_shape(make_policy_loss(plan), stats, _abstract_batch(rows, length), key)


def _array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _abstract_batch(rows: int, length: int) -> Batch:
    """Describes a batch with every array that a function can name."""
    per_token = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "sum_squared_probs", "values", "advantages")
    return Batch(
        tokens=_array(rows, length, dtype=jnp.int32),
        token_mask=_array(rows, length, dtype=bool),
        completion_mask=_array(rows, length, dtype=bool),
        rewards=_array(rows),
        group_ids=_array(rows, dtype=jnp.int32),
        **{name: _array(rows, length) for name in per_token},
        fields={
            LAGS: _array(rows, length, dtype=jnp.int32),
            TURN_IDS: _array(rows, length, dtype=jnp.int32),
            TURN_SCORES: _array(rows, length),
        },
    )
