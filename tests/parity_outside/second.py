"""The formulas of the clean dumps a second time: token by token, from a dump's header and arrays alone."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

from tests.parity_outside.batches import Array

_CISPO, _SEQUENCE = "cispo", "grpo+importance_sampling_level=sequence"


def compute_loss(header: dict[str, Any], arrays: dict[str, Array], moved: Array) -> tuple[float, float]:
    """The loss at the recorded log-probs plus `moved`, and the sum of the sizes of its terms.

    What the system treats as a constant stays at the recorded log-probs.
    """
    shares = _share(header["reduction"], arrays["mask"], header["system"])
    if header["reduction"].get("micro_batches"):
        ids = arrays["micro_batch_ids"][:, None]
        parts = [arrays["mask"] * (ids == part) for part in np.unique(ids)]
        # The weight of a masked token is that of its micro-batch, where the others have no token.
        shares = sum(part * _share(header["reduction"], part, header["system"]) for part in parts) / len(parts)
    kl_shares = shares
    if header["system"] == "skyrl":
        kl_shares = _share({"mode": "seq_mean_token_mean"}, arrays["mask"], "skyrl")
    with_kl = header.get("kl", {}).get("place") == "loss"
    total = size = 0.0
    for row, column in np.argwhere(arrays["mask"] > 0):
        token = _Token(header, arrays, int(row), int(column), moved)
        terms = [token.policy() * token.weight() * shares[row, column]]
        if with_kl:
            terms.append(header["kl"]["coef"] * token.kl() * kl_shares[row, column])
        total += sum(terms)
        size += sum(map(abs, terms))
    return total, size


def compute_advantages(header: dict[str, Any], arrays: dict[str, Array]) -> Array | None:
    """The advantages of rows that share one, or None where the system has one for each token."""
    name, system = header["advantage"]["name"], header["system"]
    if name not in ("grpo", "group_norm", "scale_rewards") and not name.startswith("scale_rewards"):
        return None
    eps = {"trl": 1e-4, "openrlhf": 1e-9}.get(system, 1e-6)
    centered = name == "scale_rewards=none" or system == "prime-rl"
    result = []
    for reward, group in zip(arrays["rewards"], arrays["group_ids"], strict=True):
        members = [float(value) for value in arrays["rewards"][arrays["group_ids"] == group]]
        deviation = statistics.pstdev(members) if system == "art" else statistics.stdev(members)
        divisor = 1.0 if centered else deviation + eps
        result.append((float(reward) - statistics.fmean(members)) / divisor)
    return np.array(result)


def compute_log_probs(header: dict[str, Any], arrays: dict[str, Array], name: str) -> tuple[Array, Array]:
    """Recorded log-probs of the rows with logits, and the same from the logits; the first column has none."""
    part, logits = ("log_probs", "logits") if name == "log_probs" else ("reference", "ref_logits")
    heated = arrays[logits].astype(float)[..., : header[part]["vocab_size"]] / header[part]["temperature"]
    normalized = heated - np.logaddexp.reduce(heated, axis=-1)[..., None]
    tokens = arrays["tokens"][arrays["rows"]][:, 1:]
    recomputed = [
        [normalized[row, column, token] for column, token in enumerate(line)] for row, line in enumerate(tokens)
    ]
    return arrays[name][arrays["rows"]][:, 1:], np.array(recomputed)


def _share(reduction: dict[str, Any], mask: Array, system: str) -> Array:
    """The weight of each token in the loss."""
    name = reduction.get("mode", reduction.get("name"))
    counts = [sum(1 for value in line if value) for line in mask]
    counted = counts if system in ("trl", "skyrl", "trinity", "slime") else [count for count in counts if count]
    rows, tokens = len(counted), sum(counts)
    if name in ("dapo", "cispo", "token-mean", "token_mean", "token", "mean"):
        divisors = [tokens for _ in counts]
    elif name == "dr_grpo":
        divisors = [reduction["max_length"] * rows for _ in counts]
    else:
        divisors = [max(count, 1) * rows for count in counts]
    return np.array([[1 / divisor for _ in line] for divisor, line in zip(divisors, mask, strict=True)])


class _Token:
    """One token with the log-probs that differentiation moves and the constants that it does not."""

    def __init__(self, header: dict[str, Any], arrays: dict[str, Array], row: int, column: int, moved: Array) -> None:
        self.header, self.arrays, self.row, self.column, self.moved = header, arrays, row, column, moved
        self.constant = self._read("log_probs")
        self.log_prob = self.constant + float(moved[row, column])
        advantages = arrays["advantages"]
        self.advantage = float(advantages[row] if advantages.ndim == 1 else advantages[row, column])
        if header.get("kl", {}).get("place") == "advantage":
            used = arrays["mask"] > 0
            differences = (arrays["log_probs"].astype(float) - arrays["ref_log_probs"])[used]
            here = self.constant - self._read("ref_log_probs")
            self.advantage += header["kl"]["coef"] * (statistics.fmean(differences) - here)

    def _read(self, name: str) -> float:
        return float(self.arrays[name][self.row, self.column])

    def weight(self) -> float:
        """The weight of the rollout correction."""
        if "correction" not in self.header:
            return 1.0
        ratio = math.exp(self._read("old_log_probs") - self._read("rollout_log_probs"))
        bounds = self.header["correction"]
        return min(max(ratio, bounds.get("lower", 0.0)), bounds["upper"])

    def policy(self) -> float:
        """The policy loss of the token, by the cases of its definition."""
        loss = self.header["loss"]
        old = self._read("old_log_probs")
        if loss.get("function") == "dppo_loss":
            return self._trusted(loss)
        if loss["name"] == _CISPO:
            weight = min(max(math.exp(self.constant - old), 1 - loss["clip_low"]), 1 + loss["clip_high"])
            return -self.advantage * weight * self.log_prob
        if loss["name"] == "sapo":
            tau = loss["tau_positive"] if self.advantage > 0 else loss["tau_negative"]
            gate = 4 / tau / (1 + math.exp(-tau * (math.exp(self.constant - old) - 1)))
            return -self.advantage * gate * self.log_prob
        ratio = self._row_ratio() if loss["name"] == _SEQUENCE else math.exp(self.log_prob - old)
        return self._clipped(ratio, loss)

    def _clipped(self, ratio: float, loss: dict[str, Any]) -> float:
        if self.advantage >= 0:
            return -self.advantage * min(ratio, 1 + loss["clip_high"])
        size = -self.advantage * max(ratio, 1 - loss["clip_low"])
        return min(size, -self.advantage * loss["dual_clip"]) if "dual_clip" in loss else size

    def _row_ratio(self) -> float:
        columns = np.flatnonzero(self.arrays["mask"][self.row])
        current = self.arrays["log_probs"][self.row].astype(float) + self.moved[self.row]
        old = self.arrays["old_log_probs"][self.row].astype(float)
        return math.exp(statistics.fmean(current[column] - old[column] for column in columns))

    def _trusted(self, loss: dict[str, Any]) -> float:
        sampled = self._read("rollout_log_probs")
        moved = math.exp(self.constant) - math.exp(sampled)
        far = moved > loss["clip_high"] if self.advantage > 0 else moved < -loss["clip_low"]
        return 0.0 if far else -self.advantage * math.exp(self.log_prob - sampled)

    def kl(self) -> float:
        """The KL estimate of the token."""
        name, system = self.header["kl"]["name"], self.header["system"]
        if name == "kl_tau":
            return (self.log_prob - self._read("rollout_log_probs")) ** 2
        difference = self.log_prob - self._read("ref_log_probs")
        if name == "k2":
            return min(difference**2 / 2, 10.0) if system == "openrlhf" else difference**2 / 2
        if name == "low_var_kl+":
            before = self.constant - self._read("ref_log_probs")
            return min(math.expm1(-before) + before, 10.0) + (difference**2 - before**2) / 2
        value = math.expm1(-difference) + difference
        if name == "k3+use_bias_correction_kl":
            value *= math.exp(self.log_prob - self._read("old_log_probs"))
        return value if system in ("trl", "trinity") else min(value, 10.0)
