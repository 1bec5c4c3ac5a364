"""The LM head: as it is stored, and the logits of a decode step. `kljax.log_probs` applies it to whole sequences."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from train.models.decoder import Decoder
from train.models.layers import in_pieces, narrow_logits
from train.models.sharding import constrain, device_kind

Tree = Any
TRANSPOSED_BYTES = 2**24
"""Size up to which a CPU transposes a tied LM head for its decode steps.

At 4 MiB and 8 rows a product takes 0.20 ms of CPU with the transposed head, and 0.31 ms with the stored one. At 32 MiB
both take 4.9 ms on one machine, and the stored one 4 ms less on another.
"""


def stored_head(model: Decoder, params: Tree) -> jax.Array:
    """Returns the LM head as it is stored: the embedding table [V, D] if tied, else the kernel [D, V]."""
    return params["embed_tokens"]["embedding"] if model.config.tie_embeddings else params["lm_head"]["kernel"]


def head(model: Decoder, params: Tree) -> jax.Array:
    """Returns the LM head as [D, V], a copy if it is tied."""
    stored = stored_head(model, params)
    return stored.T if model.config.tie_embeddings else stored


def make_logits(model: Decoder, params: Tree) -> Callable[[jax.Array, jnp.dtype], jax.Array]:
    """Makes `(hidden [B, D], dtype) -> logits [B, V]` of a decode step, soft-capped if the model caps them.

    A large tied head is read as it is stored. A small one on a CPU is transposed once, outside the loop of decode
    steps. The choice depends on shapes alone, so that a resumed run rounds as before on every machine.
    """
    stored = stored_head(model, params)
    tied = model.config.tie_embeddings
    softcap = model.config.final_softcap
    as_stored = tied and (device_kind() != "cpu" or stored.size * stored.dtype.itemsize > TRANSPOSED_BYTES)
    # Not split along D, so that the loop does not gather the head in every step.
    if as_stored:
        weights = constrain(stored, "vocab", None)
        product = "BD,VD->BV"
    else:
        weights = constrain(head(model, params), None, "vocab")
        product = "BD,DV->BV"

    def logits(hidden: jax.Array, dtype: jnp.dtype) -> jax.Array:
        if in_pieces(stored):
            values = narrow_logits(hidden, stored, dtype, tied=tied)
        else:
            values = jnp.einsum(product, hidden, weights, preferred_element_type=dtype).astype(dtype)
        return values if softcap is None else softcap * jnp.tanh(values / softcap)

    return logits
