"""The result of sampling."""

import dataclasses

import jax
from jax.sharding import Mesh

from train.models.sharding import batch_sharding, replicated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samples:
    """Prompts with their completions, in the order that was asked for.

    Attributes:
      tokens: [B, P + C] int32; after a row's end the first EOS id.
      token_mask: [B, P + C] bool, the real tokens of prompt and completion.
      completion_mask: [B, P + C] bool; what ended a row (EOS, or the tokens of a stop string) belongs to it.
      log_probs: [B, P + C] float32 at least, under the full softmax at the temperature; 0 outside completions.
      finished: [B] bool, the rows that ended by EOS or a stop string.
      steps: [] int32, decode steps that were run; each advances all slots.
      occupancy: [] float32, the mean share of slots that drew a token.
    """

    tokens: jax.Array
    token_mask: jax.Array
    completion_mask: jax.Array
    log_probs: jax.Array
    finished: jax.Array
    steps: jax.Array | int = 0
    occupancy: jax.Array | float = 1.0


def samples_sharding(mesh: Mesh) -> Samples:
    """Where the results of `sample` live, for `out_shardings`: rows over the mesh, the two numbers everywhere."""
    rows, whole = batch_sharding(mesh), replicated(mesh)
    per_row = dict.fromkeys(("tokens", "token_mask", "completion_mask", "log_probs", "finished"), rows)
    return Samples(**per_row, steps=whole, occupancy=whole)  # type: ignore[arg-type]
