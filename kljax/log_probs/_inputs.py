"""The arrays of the operation, and logits from products."""

from typing import NamedTuple

import jax.numpy as jnp

from kljax._typing import Array


class Weights(NamedTuple):
    """What a gradient can flow to. `[..., D]` hidden states and a head in the layout of the spec; None where absent.

    A `ref_head` of None beside `ref_hidden` is the head of the policy, as data.
    """

    hidden: Array
    head: Array
    bias: Array | None = None
    ref_hidden: Array | None = None
    ref_head: Array | None = None


class Data(NamedTuple):
    """What it does not flow to. `[...]` per token: targets, mask and inverse temperature; the rest are scalars."""

    inverse_temperature: Array
    logit_scale: Array
    targets: Array | None = None
    mask: Array | None = None
    softcap: Array | None = None
    beta: Array | None = None


def statistics_dtype(weights: Weights) -> jnp.dtype:
    """The type that everything but the products is computed in: float64 if any input is, else float32."""
    wide = any(x is not None and x.dtype == jnp.float64 for x in weights)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def scaled_logits(product: Array, bias: Array | None, inverse_temperature: Array, data: Data) -> tuple[Array, Array]:
    """From `hidden @ head` to logits and their slope, `d logits / d bias`; `logit_scale` times it is `d / d product`.

    Args:
      product: `[..., V]`.
      bias: `[V]` or None.
      inverse_temperature: `[..., 1]`.
      data: the scale and the cap.
    """
    raw = product * data.logit_scale
    if bias is not None:
        raw = raw + jnp.expand_dims(bias.astype(raw.dtype), tuple(range(raw.ndim - 1)))
    if data.softcap is None:
        return raw * inverse_temperature, inverse_temperature
    bent = jnp.tanh(raw / data.softcap)
    return bent * (data.softcap * inverse_temperature), (1 - bent * bent) * inverse_temperature
