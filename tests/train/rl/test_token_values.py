"""Rows of a recording have the values of the last update that they were part of."""

import jax.numpy as jnp
import numpy as np

from tests import tiny
from train.rl.token_values import TokenValues, make_select, recorded_arrays

PARTS, PART, WIDTH = 2, 2, tiny.LENGTH


def update_of(rows: list[int], value: float) -> TokenValues:
    numbers = np.array(rows, np.int32).reshape(PARTS, PART)
    values = np.broadcast_to(value + numbers[:, :, None], (PARTS, PART, WIDTH)).astype(np.float32)
    return TokenValues(jnp.asarray(numbers), {"policy_log_probs": jnp.asarray(values)})


def test_selected_rows_have_values_of_their_last_update():
    batch = tiny.full_batch(np.full((tiny.ROWS, WIDTH), -5.6))
    updates = [update_of([0, 3, 5, 6], 100.0), update_of([7, 2, 1, 4], 200.0), update_of([2, 5, 0, 1], 300.0)]
    rows = np.array([6, 5, 2, 4], np.int32)
    selected = make_select(tiny.mesh_of())(recorded_arrays(batch), updates, jnp.asarray(rows))
    mask = np.asarray(batch.completion_mask)[rows]
    expected = np.array([106.0, 305.0, 302.0, 204.0])[:, None]
    np.testing.assert_array_equal(selected["policy_log_probs"], np.where(mask, expected, 0))
    np.testing.assert_array_equal(selected["log_probs"], np.asarray(batch.rollout_log_probs)[rows])
    np.testing.assert_array_equal(selected["rewards"], np.asarray(batch.rewards)[rows])
    gap = np.where(mask, np.asarray(batch.ref_log_probs, np.float64)[rows] - expected, 0)
    np.testing.assert_allclose(selected["kl"], np.expm1(gap) - gap, rtol=1e-6)
