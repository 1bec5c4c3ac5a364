"""The log-probs of a constant reference for the rows of a recording: computed once, and kept on the host.

A recording comes back in every epoch, and a constant reference would give a row the same log-probs each time. Policy
and reference are then two programs, so that that of the policy is one, whether the reference has to run or not.
"""

import jax
import numpy as np
from jax.sharding import Mesh

from train.config.errors import warn
from train.config.plan import Plan
from train.distributed.exchange import agree
from train.distributed.global_arrays import held_rows, to_host, to_host_rows
from train.models import Decoder
from train.models.shard_rows import shard_rows
from train.models.sharding import batch_sharding
from train.rl.policy import ScoredPolicy
from train.rl.step import ReferenceScore, make_reference_score
from train.sequences.batch import Batch, move_columns, prompt_lengths

MIB = 2**20


def make_reference_store(plan: Plan, model: Decoder, mesh: Mesh, rows: int | None) -> "ReferenceStore | None":
    """Makes the store of a run, or returns None if the reference scores every batch.

    Args:
      plan: says whether the reference is constant, and how much memory the store may take.
      model: the decoder of the policy.
      mesh: of the update.
      rows: number of rows of the recording; None: completions come from elsewhere.

    Raises:
      UserError: the recordings of two processes have different numbers of rows.
    """
    config = plan.config
    source = plan.config.rollout.source
    if rows is None or not plan.keeps_ref_log_probs or source.type != "file":
        return None
    agree("rollout.source", {"rows": rows})
    columns = config.data.completion_length()
    needed = -(-rows * columns * np.dtype(np.float32).itemsize // MIB)
    if needed > source.max_reference_mib:
        warn(
            f"rollout.source.max_reference_mib: got {source.max_reference_mib}, expected at least {needed} for {rows} "
            f"rows of {columns} tokens; the reference scores them again in every epoch"
        )
        return None
    return ReferenceStore(make_reference_score(plan, model, mesh), mesh, rows=rows, columns=columns)


class ReferenceStore:
    """Scores rows with a constant reference, and keeps their log-probs.

    With several processes each keeps all rows, since a row may come to the devices of another one in the next epoch.
    """

    def __init__(self, score: ReferenceScore, mesh: Mesh, *, rows: int, columns: int) -> None:
        """Takes the program of `make_reference_score`, the mesh, and the numbers of rows and of completion columns."""
        self._score = score
        self._mesh = mesh
        # The system gives zeros their memory when they are first written.
        self._log_probs = np.zeros((rows, columns), np.float32)
        self._scored = np.zeros(rows, bool)
        self._under_way: list[tuple[np.ndarray, jax.Array]] = []

    def score(self, base: object, reference: ScoredPolicy, batch: Batch, rows: np.ndarray) -> jax.Array:
        """Returns the log-probs [B, T] of a batch, whose rows have these numbers [B] in the recording.

        The reference scores the whole batch if one of its rows is new; does not wait for the devices then.
        """
        if self._scored[rows].all():
            self.collect()
            return self._onto_devices(rows, batch)
        log_probs, scores = self._score(base, reference, batch)
        scores.copy_to_host_async()
        self._under_way.append((rows, scores))
        self._scored[rows] = True
        return log_probs

    def collect(self) -> None:
        """Takes over the log-probs that were computed, for which it waits."""
        for rows, scores in self._under_way:
            self._log_probs[rows] = to_host(scores)
        self._under_way.clear()

    def _onto_devices(self, rows: np.ndarray, batch: Batch) -> jax.Array:
        """Puts the log-probs of rows on the devices; they are 0 at the tokens of prompts."""
        local_rows = rows[held_rows(batch_sharding(self._mesh), len(rows))]
        prompts = np.asarray(to_host_rows(prompt_lengths(batch)))
        log_probs = move_columns(self._log_probs[local_rows], -prompts, batch.tokens.shape[1])
        return shard_rows(log_probs, self._mesh)
