"""An update written out in NumPy, with a switch for each fault; nothing of kljax takes part in it.

Gradients are written by hand. The batch has prompts padded on the left, rows cut at the limit, a group of equal
rewards, and ratios far from 1.
"""

import dataclasses
from typing import Any

import numpy as np

from tests import other_seeds

ROWS, PROMPT, COMPLETION = 12, 5, 9
LENGTH, GROUP, PAD, EOS = PROMPT + COMPLETION, 4, 0, 1
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Plant:
    """The settings of an update; the defaults are what `HEADER` says."""

    mask: str = "completion"
    used: str = "completion"
    eps: float = 1e-4
    root: bool = False
    discount: float = 1.0
    spread: bool = False
    advantage_clip: float = np.inf
    whiten: bool = False
    reward_coef: float = 0.0
    reward_padded: bool = False
    kl_coef: float = 0.04
    clip_low: float = 0.2
    clip_high: float = 0.28
    delta: float = np.inf
    cap: float = 2.0
    entropy: float = 0.0
    mode: str = "token_mean"
    drop_equal: bool = False
    drop_cut: bool = False
    scale: float = 1.0
    grad_scale: float = 1.0
    policy_scale: float = 1.0
    old: bool = True


HEADER: dict[str, Any] = {
    "system": "trl",
    "dtype": "float32",
    "pad_id": PAD,
    "eos_id": EOS,
    "loss": {"name": "dapo", "clip_high": 0.28},
    "reduction": {"name": "dapo"},
    "kl": {"name": "k3", "coef": 0.04},
    "advantage": {"name": "scale_rewards=group"},
    "correction": {"name": "token_truncate", "upper": 2.0},
}


def batch(seed: int = 0) -> Arrays:
    """Draws log-probs of four policies, tokens, lengths and rewards."""
    rng = other_seeds.example(seed)
    policy = -0.2 - rng.exponential(1.0, (ROWS, LENGTH))
    arrays = {"log_probs": policy}
    for name, distance in (("old", 0.3), ("rollout", 0.4), ("ref", 0.5)):
        arrays[f"{name}_log_probs"] = np.minimum(policy + distance * rng.normal(size=policy.shape), -1e-3)
    sizes = np.array([9, 5, 3, 9, 4, 9, 6, 2, 7, 9, 5, 8])
    starts = np.array([0, 2, 1, 3, 0, 2, 1, 0, 2, 1, 0, 3])
    tokens = rng.integers(2, 30, (ROWS, LENGTH))
    position = np.arange(LENGTH)
    tokens[(position < starts[:, None]) | (position >= PROMPT + sizes[:, None])] = PAD
    complete = sizes < COMPLETION
    tokens[complete, PROMPT + sizes[complete] - 1] = EOS
    arrays |= {"tokens": tokens, "prompt_lengths": np.full(ROWS, PROMPT), "lengths": PROMPT + sizes}
    rewards = np.round(rng.normal(size=ROWS), 2)
    rewards[GROUP : 2 * GROUP] = 0.5
    entropy = 0.3 + rng.random((ROWS, LENGTH))
    return {**arrays, "group_ids": np.arange(ROWS) // GROUP, "rewards": rewards, "entropy": entropy, "starts": starts}


def mask_of(name: str, arrays: Arrays) -> np.ndarray:
    """Returns a mask by name, float64."""
    position = np.arange(LENGTH)
    mask = (position >= PROMPT) & (position < arrays["lengths"][:, None])
    if name == "prompt":
        mask |= (position >= arrays["starts"][:, None]) & (position > 0) & (position < PROMPT)
    if name == "pad":
        mask |= position >= PROMPT
    if name == "complete":
        mask &= (arrays["lengths"] < LENGTH)[:, None]
    if name == "right":
        mask = np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    return mask.astype(np.float64)


def advantages_of(arrays: Arrays, mask: np.ndarray, plant: Plant) -> np.ndarray:
    """GRPO's advantages, `[B, T]`."""
    k1 = (arrays["old_log_probs"] - arrays["ref_log_probs"]) * (mask_of("pad", arrays) if plant.reward_padded else mask)
    rewards = (arrays["rewards"] - plant.reward_coef * k1.sum(1)).reshape(-1, GROUP)
    centered = rewards - rewards.mean(1, keepdims=True)
    variance = rewards.var(1, ddof=1, keepdims=True)
    divisor = np.sqrt(variance + plant.eps) if plant.root else np.sqrt(variance) + plant.eps
    rows = (centered / divisor).reshape(-1)
    rows = np.clip(rows, -plant.advantage_clip, plant.advantage_clip)
    if plant.spread:
        rows = rows / mask.sum(1)
    after = mask[:, ::-1].cumsum(1)[:, ::-1] - 1
    result = rows[:, None] * np.where(mask > 0, plant.discount**after, 0)
    if plant.whiten:
        members = result[mask > 0]
        result = (result - members.mean()) / np.sqrt(members.var(ddof=1) + 1e-8) * mask
    return result * mask


def weights_of(mask: np.ndarray, arrays: Arrays, advantages: np.ndarray, plant: Plant) -> np.ndarray:
    """The weight of each token in the loss."""
    rows = np.ones(ROWS)
    if plant.drop_equal:
        rows = (advantages != 0).any(1).astype(float)
    if plant.drop_cut:
        rows = (arrays["lengths"] < LENGTH).astype(float)
    mask = mask * rows[:, None]
    lengths = np.maximum(mask.sum(1, keepdims=True), 1)
    weights = mask / mask.sum() if plant.mode == "token_mean" else mask / lengths / ROWS
    return plant.scale * weights


def update(plant: Plant, seed: int = 0) -> Arrays:
    """Returns every field of the dump of an update, in float32."""
    arrays = batch(seed)
    if not plant.old:
        arrays["old_log_probs"] = arrays["log_probs"]
    recorded = mask_of(plant.mask, arrays)
    used = mask_of(plant.used, arrays) if plant.mask == "completion" else recorded
    policy, old = arrays["log_probs"], arrays["old_log_probs"]
    advantages = advantages_of(arrays, recorded, plant)
    weights = np.minimum(np.exp(old - arrays["rollout_log_probs"]), plant.cap) * recorded
    ratio = np.exp(policy - old)
    capped = np.minimum(ratio, plant.delta)
    clipped = np.clip(ratio, 1 - plant.clip_low, 1 + plant.clip_high)
    plain = capped * advantages <= clipped * advantages
    token_loss = plant.policy_scale * -np.where(plain, capped, clipped) * advantages * weights
    slope = np.where(plain & (ratio <= plant.delta), -ratio * advantages, 0)
    slope = plant.policy_scale * np.where(~plain & (clipped == ratio), -ratio * advantages, slope) * weights
    x = policy - arrays["ref_log_probs"]
    kl = np.exp(-x) + x - 1
    per_token = token_loss + plant.kl_coef * kl - plant.entropy * arrays["entropy"]
    shares = weights_of(used, arrays, advantages, plant)
    grad = shares * (slope + plant.kl_coef * (1 - np.exp(-x)))
    fields = {name: array for name, array in arrays.items() if name != "starts"}
    fields |= {"mask": recorded, "ratio": ratio, "weights": weights, "advantages": advantages, "kl": kl * used}
    fields |= {"token_loss": token_loss * used, "loss": (per_token * shares).sum(), "grad_log_probs": grad}
    fields["grad_log_probs"] = plant.grad_scale * fields["grad_log_probs"]
    integers = ("tokens", "prompt_lengths", "lengths", "group_ids")
    return {name: np.asarray(value, None if name in integers else np.float32) for name, value in fields.items()}
