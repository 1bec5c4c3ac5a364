"""The values that an update computes for each token, and the selection of some rows of them for a recording."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import kljax
from train.models.sharding import replicated
from train.sequences.batch import Batch, per_token_fields, present_arrays, prompt_lengths, required
from train.sequences.token_fields import recorded_names

Array = jax.Array
PER_TOKEN = ("policy_log_probs", "entropy", "loss_weights", "exact_kl")
"""The names of values that an update may compute."""


class TokenValues(NamedTuple):
    """Per-token values of one update, detached, in its micro-batches.

    Attributes:
      rows: [M, n] int32, the number of each row in the rollout batch.
      values: [M, n, T] by the names of `PER_TOKEN`.
    """

    rows: Array
    values: Mapping[str, Array]


def recorded_arrays(batch: Batch) -> dict[str, Array]:
    """Returns rewards and prompt lengths `[B]`, and arrays `[B, T, ...]` of a batch, by the keys of recordings."""
    arrays = present_arrays(per_token_fields(batch)) | batch.fields
    keys = {name: key for key, name in recorded_names().items()}
    of_rows = {"rewards": required(batch.rewards), "prompt_lengths": prompt_lengths(batch)}
    return {keys.get(name, name): x for name, x in arrays.items() if x.ndim > 1} | of_rows


def make_select(mesh: Mesh) -> Callable[[Mapping[str, Array], Sequence[TokenValues], Array], dict[str, Array]]:
    """Compiles `(arrays, updates, rows) -> arrays of these rows`, whole on every device.

    `arrays` come from `recorded_arrays`. A row that several updates have has the values of the last. The result has a
    `kl` too, the k3 estimate of the KL to the reference, if its log-probs are there.
    """

    def select(arrays: Mapping[str, Array], updates: Sequence[TokenValues], rows: Array) -> dict[str, Array]:
        selected = {name: x[rows] for name, x in arrays.items()}
        mask = selected["completion_mask"]
        for update in updates:
            matches = rows[:, None] == update.rows.reshape(-1)
            part, position = jnp.divmod(matches.argmax(-1), update.rows.shape[1])
            for name, x in update.values.items():
                old = selected.get(name, jnp.zeros(mask.shape, x.dtype))
                selected[name] = jnp.where(matches.any(-1)[:, None] & mask, x[part, position], old)
        if "ref_log_probs" in selected:
            policy = selected["policy_log_probs"]
            reference = selected["ref_log_probs"]
            selected["kl"] = kljax.estimate_kl(policy, reference, mask, estimator="k3")
        return selected

    return jax.jit(select, out_shardings=replicated(mesh))
