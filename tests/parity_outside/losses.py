"""The policy losses of the systems, and what ports have made of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.parity_outside.batches import Array
from tests.parity_outside.scoring import FIELDS
from tests.parity_outside.settings import Settings
from tests.parity_outside.tape import Node, larger, select, smaller


def policy_loss(log_probs: Node, ratio: Node, advantages: Array, fields: dict[str, Array], settings: Settings) -> Node:
    """The policy loss of each token, before weights and masks."""
    low, high = settings["clip_low"], settings["clip_high"]
    if settings["loss"] == "ppo":
        free, bounded = ratio * -advantages, ratio.clip(1 - low, 1 + high) * -advantages
        loss = smaller(free, bounded) if settings["optimistic"] else larger(free, bounded)
        if settings["dual_clip"] is not None:
            limit = Node(
                np.broadcast_to(-advantages * settings["dual_clip"], loss.value.shape).astype(loss.value.dtype)
            )
            bounded_below = (advantages < 0) | (settings["dual_clip_side"] == "both")
            loss = select(np.broadcast_to(bounded_below, loss.value.shape), smaller(loss, limit), loss)
    elif settings["loss"] in _OTHER_LOSSES:
        loss = _OTHER_LOSSES[settings["loss"]](log_probs, ratio, advantages, fields, settings)
    elif settings["loss"] == "unclipped":
        loss = ratio * -advantages
    elif settings["loss"] == "reinforce":
        loss = log_probs * -advantages
    elif settings["loss"] == "cispo":
        loss = log_probs * (ratio.clip(1 - low, 1 + high).detach().value * -advantages)
    elif settings["loss"] == "cispo masked":
        inside = (ratio.value >= 1 - low) & (ratio.value <= 1 + high)
        loss = log_probs * (np.where(inside, ratio.value, 0) * -advantages)
    elif settings["loss"] == "cispo with gradient":
        loss = log_probs * ratio.clip(1 - low, 1 + high) * -advantages
    elif settings["loss"] in ("sapo", "sapo gate", "sapo unscaled"):
        tau = np.where(advantages > 0, settings["tau_positive"], settings["tau_negative"])
        tau = np.broadcast_to(tau, ratio.value.shape).astype(ratio.value.dtype)
        # unsloth-zoo pull request 869: without the factor 4 / tau the gate is 0.5 at a ratio of 1.
        loss = ((ratio - 1.0) * tau).sigmoid() * (1.0 if settings["loss"] == "sapo unscaled" else 4 / tau)
        loss = loss * -advantages if settings["loss"] == "sapo gate" else log_probs * (loss.value * -advantages)
    else:
        signs = np.where(trusted_tokens(fields, advantages, settings), -advantages, 0).astype(ratio.value.dtype)
        loss = log_probs * (ratio.value * signs) if settings["loss"] == "dppo through log-probs" else ratio * signs
    return loss * (settings["loss_sign"] * settings["token_loss_factor"])


def trusted_tokens(fields: dict[str, Array], advantages: Array, settings: Settings) -> Array:
    """True on the tokens that the trust region of DPPO keeps in the policy loss."""
    low, high = settings["clip_low"], settings["clip_high"]
    moved = np.exp(fields["log_probs"]) - np.exp(fields[FIELDS[settings["trust_policy"]]])
    if settings["loss"] == "ipo":
        return np.asarray((moved <= high) & (moved >= -low))
    if settings["loss"] == "dppo binary kl":
        far = _binary_kl(fields)
        return np.where(advantages > 0, (far <= high) | (moved <= 0), (far <= low) | (moved >= 0))
    return np.where(advantages > 0, moved <= high, moved >= -low)


def _binary_kl(fields: dict[str, Array]) -> Array:
    """Divergence of the sampler from the policy, of the token against all others."""
    sampled, current = np.exp(fields["rollout_log_probs"]), np.exp(fields["log_probs"])
    rest = np.log((1 - sampled + 1e-8) / (1 - current + 1e-8))
    return np.asarray(sampled * (fields["rollout_log_probs"] - fields["log_probs"]) + (1 - sampled) * rest)


def _clipped_only(
    log_probs: Node, ratio: Node, advantages: Array, fields: dict[str, Array], settings: Settings
) -> Node:
    """The bounded surrogate of PPO, without the maximum of both."""
    return ratio.clip(1 - settings["clip_low"], 1 + settings["clip_high"]) * -advantages


def _log_clipped(log_probs: Node, ratio: Node, advantages: Array, fields: dict[str, Array], settings: Settings) -> Node:
    """PPO with the bounds on the logarithm of the ratio, as GMPO has them."""
    difference = log_probs - fields["old_log_probs"]
    bounded = difference.clip(-settings["clip_low"], settings["clip_high"]).exp()
    return larger(ratio * -advantages, bounded * -advantages)


def _geometric_mean(
    log_probs: Node, ratio: Node, advantages: Array, fields: dict[str, Array], settings: Settings
) -> Node:
    """The ratio of a row from log-ratios that are bounded one by one, as in GMPO."""
    mask = fields["mask"]
    difference = log_probs - fields["old_log_probs"]
    bounded = difference.clip(-settings["clip_low"], settings["clip_high"])
    positive = np.broadcast_to(advantages > 0, mask.shape)
    chosen = select(positive, smaller(difference, bounded), larger(difference, bounded))
    weights = (mask / np.maximum(mask.sum(axis=1, keepdims=True), 1)).astype(difference.value.dtype)
    mean = (select(mask, chosen, Node(np.zeros_like(chosen.value))) * weights).sum(axis=1)
    return mean.exp() * -advantages


def _covariance_loss(
    log_probs: Node, ratio: Node, advantages: Array, fields: dict[str, Array], settings: Settings
) -> Node:
    """Unclipped, with the size of the log-ratio on the fifth of the tokens that has the largest covariance."""
    mask = fields["mask"]
    spread = np.broadcast_to(advantages, mask.shape)
    centered = fields["log_probs"] - fields["log_probs"][mask].mean()
    covariance = np.where(mask, (spread - spread[mask].mean()) * centered, -np.inf)
    count = max(1, int(0.2 * mask.sum()))
    largest = covariance >= np.sort(covariance.ravel())[-count]
    penalty = (log_probs - fields["old_log_probs"]).abs()
    return ratio * -advantages + penalty * largest.astype(ratio.value.dtype)


def _gamma_weighted(
    log_probs: Node, ratio: Node, advantages: Array, fields: dict[str, Array], settings: Settings
) -> Node:
    """Log-probs with a gamma weight of the row's ratio, as in VESPO."""
    difference = np.where(fields["mask"], fields["log_probs"] - fields["old_log_probs"], 0)
    log_row = np.clip(difference.sum(axis=1, keepdims=True), np.log(1e-8), 20)
    power, rate = np.where(advantages >= 0, 2.0, 3.0), np.where(advantages >= 0, 3.0, 2.0)
    weight = np.exp(rate + power * log_row - rate * np.exp(log_row))
    return log_probs * (weight * -advantages).astype(difference.dtype)


def _masked_side(log_probs: Node, ratio: Node, advantages: Array, fields: dict[str, Array], settings: Settings) -> Node:
    """CISPO without the tokens that PPO's clip would leave without a gradient."""
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
    clipped = np.where(advantages > 0, ratio.value > high, (ratio.value < low) & (advantages < 0))
    return log_probs * (np.where(clipped, 0, np.clip(ratio.value, low, high)) * -advantages)


_OTHER_LOSSES: dict[str, Callable[[Node, Node, Array, dict[str, Array], Settings], Node]] = {
    "clipped only": _clipped_only,
    "log clip": _log_clipped,
    "geometric mean": _geometric_mean,
    "kl cov": _covariance_loss,
    "vespo": _gamma_weighted,
    "cispo without clipped": _masked_side,
}
