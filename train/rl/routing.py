"""Metrics of the routers of a mixture of experts."""

import jax
import jax.numpy as jnp

import kljax
from train.models.config import DecoderConfig
from train.models.experts import Routed
from train.rl.metrics import Metrics


def routing_metrics(config: DecoderConfig, routed: Routed, recorded: jax.Array | None) -> Metrics:
    """Measures how the routers chose, and how their choices differ from recorded routes.

    Args:
      config: the decoder.
      routed: arrays [..., L, k], and logits [..., L, E].
      recorded: [..., L, k] int, in the same layout; -1: unknown. None: there are none.

    Returns:
      `router_entropy`, in nats; with recorded routes the shares of pairs of a token and a layer: `routing_flips`, where
      the router would choose other experts than the recorded ones, also by layer; `routing_lost`, where others were
      used; and `routing_missing`, which have no recorded routes.
    """
    real = routed.routes[..., 0] >= 0
    log_probs = jax.nn.log_softmax(routed.logits.astype(jnp.float32))
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    metrics: Metrics = {"router_entropy": kljax.WeightedSum.of(jax.lax.stop_gradient(entropy), real)}
    if recorded is None:
        return metrics
    ordered = jnp.sort(recorded, axis=-1).astype(routed.routes.dtype)
    known = real & (ordered[..., 0] >= 0)
    flips = jnp.any(ordered != routed.chosen, axis=-1).astype(jnp.float32)
    lost = jnp.any(ordered != routed.routes, axis=-1).astype(jnp.float32)
    metrics["routing_flips"] = kljax.WeightedSum.of(flips, known)
    metrics["routing_lost"] = kljax.WeightedSum.of(lost, known)
    metrics["routing_missing"] = kljax.WeightedSum.of((~known).astype(jnp.float32), real)
    for index, layer in enumerate(config.expert_layers):
        metrics[f"routing_flips_layer_{layer}"] = kljax.WeightedSum.of(flips[..., index], known[..., index])
    return metrics
