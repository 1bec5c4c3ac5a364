"""Formulas a second time: of the clean dumps and of new faults, token by token, from a header and arrays alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import ml_dtypes
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


def compute_planted(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    """The first field that a fault of the fourth list changes, a second time; NaN where the formula says nothing.

    Empty where no second formula is written for the fault.
    """
    for formulas in (_planted_log_probs, _planted_advantages, _planted_weights, _planted_kl, _planted_loss):
        result = formulas(setting, value, header, arrays)
        if result:
            return result
    return {}


def _on_mask(arrays: dict[str, Array], formula: Callable[[int, int], float]) -> Array:
    result = np.full(arrays["mask"].shape, np.nan)
    for row, column in np.argwhere(arrays["mask"] > 0):
        result[row, column] = formula(int(row), int(column))
    return result


def _planted_log_probs(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    if setting.removeprefix("ref_") not in ("logits_shift", "logits_dtype", "normalizer") or "rows" not in arrays:
        return {}
    reference = setting.startswith("ref_")
    name, part, logits = (
        ("ref_log_probs", "reference", "ref_logits") if reference else ("log_probs", "log_probs", "logits")
    )
    result = np.full(arrays["mask"].shape, np.nan)
    for number, row in enumerate(arrays["rows"]):
        for column in range(1, arrays["mask"].shape[1] - 1):
            predicting = column if setting.endswith("logits_shift") else column - 1
            line = arrays[logits][number, predicting].astype(float)
            if setting.endswith("logits_dtype"):
                line = line.astype(ml_dtypes.bfloat16).astype(float)
            line = line[: header[part]["vocab_size"]] / header[part]["temperature"]
            token = int(arrays["tokens"][row, column])
            probabilities = np.exp(line) / np.exp(line).sum()
            summed = set(range(line.size))
            if setting.endswith("normalizer") and value.startswith("top p "):
                summed, reached = set(), 0.0
                for candidate in np.argsort(-probabilities):
                    if reached >= float(value[6:]):
                        break
                    summed.add(int(candidate))
                    reached += probabilities[candidate]
            elif setting.endswith("normalizer"):
                return {}
            total = sum(probabilities[candidate] for candidate in summed | {token})
            result[row, column] = math.log(probabilities[token] / total)
    return {name: result}


def _planted_advantages(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    rewards, ids = arrays["rewards"].astype(float), arrays["group_ids"]
    changed = _planted_rewards(setting, value, {**arrays, "rewards": rewards})
    if (setting, value) == ("groups", "within micro-batches"):
        ids = ids + 1000 * arrays["micro_batch_ids"]
    normal = compute_advantages(
        header, {**arrays, "rewards": rewards if changed is None else changed, "group_ids": ids}
    )
    if normal is None:
        return {}
    if changed is not None or ids is not arrays["group_ids"]:
        return {"advantages": normal}
    if (setting, value) == ("advantage_place", "last token"):
        ends, columns = arrays["lengths"] - 1, range(arrays["mask"].shape[1])
        places = [[float(column == end) for column in columns] for end in ends]
        return {"advantages": normal[:, None] * np.array(places)}
    result = [_planted_row(setting, value, header, {**arrays, "rewards": rewards}, row) for row in range(len(rewards))]
    return {} if None in result else {"advantages": np.array(result)}


def _planted_rewards(setting: str, value: Any, arrays: dict[str, Array]) -> Array | None:
    """The rewards that a system with this fault reads."""
    rewards, rows = arrays["rewards"], range(len(arrays["rewards"]))
    lengths = (arrays["lengths"] - arrays["prompt_lengths"]).astype(float)
    # Some rows of each batch are cut at the limit.
    limit = lengths.max()
    changes: dict[tuple[str, Any], Callable[[int], float]] = {
        ("reward_transform", "ranks"): lambda row: sum(rewards < rewards[row]) / len(rewards),
        ("reward_transform", "right or wrong"): lambda row: float(rewards[row] > 0.5),
        ("reward_rows", "by length"): lambda row: rewards[
            sorted(rows, key=lambda other: arrays["lengths"][other])[row]
        ],
        ("length_penalty", value): lambda row: rewards[row] - value * lengths[row] / limit,
        ("overlong_buffer", value): lambda row: rewards[row] - max(lengths[row] - limit + value, 0) / value,
        ("reward_dtype", "bfloat16"): lambda row: float(rewards[row].astype(ml_dtypes.bfloat16)),
    }
    change = changes.get((setting, value))
    return None if change is None else np.array([change(row) for row in rows])


def _planted_row(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array], row: int) -> float | None:
    """The advantage of a row whose group, or what the group is compared with, is another."""
    rewards, ids, parts = arrays["rewards"], arrays["group_ids"], arrays["micro_batch_ids"]
    eps = {"trl": 1e-4, "openrlhf": 1e-9}.get(header["system"], 1e-6)
    reward, members = float(rewards[row]), [float(other) for other in rewards[ids == ids[row]]]
    centered, deviation = reward - statistics.fmean(members), statistics.stdev(members)
    local = [float(other) for other, part in zip(rewards, parts, strict=True) if part in parts[ids == ids[row]]]
    first, second = sorted(members, reverse=True)[:2]
    best = row == next(other for other in range(len(ids)) if ids[other] == ids[row] and rewards[other] == first)
    formulas: dict[tuple[str, Any], Callable[[], float]] = {
        ("scale_floor", value): lambda: centered / (max(deviation, value) + eps),
        ("scale", "micro-batch std"): lambda: centered / (statistics.stdev(local) + eps),
        ("center", "log mean exp"): lambda: reward - math.log(statistics.fmean(map(math.exp, members))),
        ("center", "worst"): lambda: (reward - min(members)) / (deviation + eps),
        ("advantage", "pass at k"): lambda: best * (first - second) / (deviation + eps),
    }
    formula = formulas.get((setting, value))
    return None if formula is None else formula()


def _limit(arrays: dict[str, Array]) -> float:
    """The longest completion; some rows of each batch are cut at the limit."""
    return float((arrays["lengths"] - arrays["prompt_lengths"]).max())


def _planted_weights(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    if "correction" not in header:
        return {}
    low, high = header["correction"].get("lower", 0.0), header["correction"]["upper"]
    used = arrays["mask"] > 0
    difference = arrays["old_log_probs"].astype(float) - arrays["rollout_log_probs"]
    ratio = np.exp(difference)

    def bounded(weight: float) -> float:
        return min(max(weight, low), high)

    def rounded(row: int, column: int) -> float:
        return bounded(math.exp(float(difference[row, column].astype(ml_dtypes.bfloat16))))

    def exchanged(row: int, column: int) -> float:
        other = float(arrays["rollout_log_probs"][len(ratio) - 1 - row, column])
        return bounded(math.exp(float(arrays["old_log_probs"][row, column]) - other))

    def product(row: int, column: int) -> float:
        return bounded(math.prod(float(ratio[row, before]) for before in range(column + 1) if used[row, before]))

    pairs = zip(ratio, used, strict=True)
    means = [statistics.fmean(map(bounded, line[inside])) for line, inside in pairs if inside.any()]
    formulas: dict[tuple[str, Any], Callable[[int, int], float]] = {
        ("correction_veto", value): lambda row, column: (
            0.0 if min(ratio[row][used[row]]) < value else bounded(ratio[row, column])
        ),
        ("correction_dtype", "bfloat16"): rounded,
        ("rollout_rows", "reversed"): exchanged,
        ("correction_level", "prefix"): product,
        ("correction", "reject"): lambda row, column: ratio[row, column] * (low <= ratio[row, column] <= high),
        ("correction_mean_one", "before the bounds"): lambda row, column: bounded(
            ratio[row, column] / ratio[used].mean()
        ),
        ("correction_mean_one", "mean of rows"): lambda row, column: (
            bounded(ratio[row, column]) / statistics.fmean(means)
        ),
    }
    formula = formulas.get((setting, value))
    return {} if formula is None else {"weights": _on_mask(arrays, formula)}


def _planted_kl(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    if setting not in ("kl_ratio", "kl_log_ratio_clip", "kl_level") or "kl" not in header:
        return {}
    current, old, sampled, reference = (
        arrays[name].astype(float) for name in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")
    )

    def mean(values: Array, row: int) -> float:
        return statistics.fmean(float(entry) for entry in values[row][arrays["mask"][row] > 0])

    def formula(row: int, column: int) -> float:
        difference = current[row, column] - reference[row, column]
        if setting == "kl_level":
            difference = mean(current - reference, row)
        elif setting == "kl_log_ratio_clip":
            difference = min(max(difference, -value), value)
        estimate = math.exp(-difference) + difference - 1
        factors = {
            "row": lambda: math.exp(mean(current - old, row)),
            "to the sampler": lambda: math.exp(current[row, column] - sampled[row, column]),
            "inverse": lambda: math.exp(old[row, column] - current[row, column]),
        }
        return estimate * factors[value]() if setting == "kl_ratio" else estimate

    return {"kl": _on_mask(arrays, formula)}


def _planted_loss(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    """Faults of the ratio, of the policy loss and of its divisors."""
    current, old, sampled = (arrays[name].astype(float) for name in ("log_probs", "old_log_probs", "rollout_log_probs"))
    order = sorted(range(len(old)), key=lambda row: arrays["lengths"][row])
    mixed = np.where((arrays["micro_batch_ids"] == 0)[:, None], current, old)
    rounded = (arrays["log_probs"] - arrays["old_log_probs"]).astype(ml_dtypes.bfloat16).astype(float)
    log_ratio = {
        ("log_ratio_dtype", "bfloat16"): rounded,
        ("old_rows", "by length"): current - old[order],
        ("old_rows", "policy in the first micro-batch"): current - mixed,
    }.get((setting, value))
    if log_ratio is not None:
        return {"ratio": _on_mask(arrays, lambda row, column: math.exp(log_ratio[row, column]))}
    if setting == "divisor_mask" and value in ("one token more", "no end token"):
        return {"loss": np.array(_divided(value, header, arrays))}
    if setting in ("trust_policy", "dual_clip_side", "row_rejection") or (setting == "loss" and value in _LOSSES):
        return {"token_loss": _on_mask(arrays, _other_losses(setting, value, header, arrays, (current, old, sampled)))}
    return {}


_LOSSES = {
    "geometric mean",
    "vespo",
    "kl cov",
    "clipped only",
    "cispo without clipped",
    "dppo binary kl",
    "dppo through log-probs",
}


def _divided(counted: str, header: dict[str, Any], arrays: dict[str, Array]) -> float:
    """The mean over rows of sums that are divided by another number of tokens."""
    lengths = arrays["lengths"] - arrays["prompt_lengths"]
    if counted == "no end token":
        # A row that is cut at the limit has none.
        counts = np.where(lengths == lengths.max(), lengths, lengths - 1)
    else:
        counts = np.minimum(lengths + 1, arrays["mask"].shape[1] - arrays["prompt_lengths"])
    terms = arrays["token_loss"].astype(float)
    if "kl" in header:
        terms = terms + header["kl"]["coef"] * arrays["kl"].astype(float)
    sums = np.where(arrays["mask"] > 0, terms, 0).sum(axis=1)
    return statistics.fmean(sums / np.maximum(counts, 1))


def _other_losses(
    setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array], models: tuple[Array, Array, Array]
) -> Callable[[int, int], float]:
    current, old, sampled = models
    low, high = header["loss"]["clip_low"], header["loss"]["clip_high"]
    used = arrays["mask"] > 0
    tokens = [(int(row), int(column)) for row, column in np.argwhere(used)]
    still = np.zeros(used.shape)
    mean_log_prob = statistics.fmean(float(current[token]) for token in tokens)
    mean_advantage = statistics.fmean(float(arrays["advantages"][row]) for row, _ in tokens)
    covariances = {
        (row, column): (float(arrays["advantages"][row]) - mean_advantage) * (current[row, column] - mean_log_prob)
        for row, column in tokens
    }
    top = sorted(covariances, key=covariances.__getitem__, reverse=True)[: max(1, int(0.2 * len(tokens)))]

    def trusted(row: int, column: int) -> float:
        advantage, sampled_p = float(arrays["advantages"][row]), math.exp(sampled[row, column])
        current_p = math.exp(current[row, column])
        moved = current_p - (math.exp(old[row, column]) if setting == "trust_policy" else sampled_p)
        far = moved > high if advantage > 0 else moved < -low
        if value == "dppo binary kl":
            rest = (1 - sampled_p) * math.log((1 - sampled_p + 1e-8) / (1 - current_p + 1e-8))
            divergence = sampled_p * (sampled[row, column] - current[row, column]) + rest
            far = divergence > high and moved > 0 if advantage > 0 else divergence > low and moved < 0
        last = current[row, column] if value == "dppo through log-probs" else 1.0
        return 0.0 if far else -advantage * math.exp(current[row, column] - sampled[row, column]) * last

    def geometric(row: int, column: int) -> float:
        advantage = float(arrays["advantages"][row])
        choose = min if advantage > 0 else max
        chosen = [choose(entry, min(max(entry, -low), high)) for entry in (current - old)[row][used[row]]]
        return -advantage * math.exp(statistics.fmean(chosen))

    def gamma_weighted(row: int, column: int) -> float:
        advantage = float(arrays["advantages"][row])
        log_row = min(max(math.fsum((current - old)[row][used[row]]), math.log(1e-8)), 20.0)
        power, rate = (2, 3) if advantage >= 0 else (3, 2)
        weight = math.exp(rate) * math.exp(log_row) ** power * math.exp(-rate * math.exp(log_row))
        return -advantage * weight * current[row, column]

    def bounded(row: int, column: int) -> float:
        ratio = math.exp(current[row, column] - old[row, column])
        return -float(arrays["advantages"][row]) * min(max(ratio, 1 - low), 1 + high)

    def covariant(row: int, column: int) -> float:
        delta = current[row, column] - old[row, column]
        return -float(arrays["advantages"][row]) * math.exp(delta) + (abs(delta) if (row, column) in top else 0.0)

    def not_clipped(row: int, column: int) -> float:
        ratio = math.exp(current[row, column] - old[row, column])
        clipped = ratio > 1 + high if arrays["advantages"][row] > 0 else ratio < 1 - low
        weight = _Token(header, arrays, row, column, still).weight()
        return 0.0 if clipped else bounded(row, column) * current[row, column] * weight

    def rejected(row: int, column: int) -> float:
        token = _Token(header, arrays, row, column, still)
        far = statistics.fmean(np.abs(old - sampled)[row][used[row]]) > value
        return 0.0 if far else token.policy() * token.weight()

    def both_sides(row: int, column: int) -> float:
        token = _Token(header, arrays, row, column, still)
        return min(token.policy(), -token.advantage * header["loss"]["dual_clip"])

    return {
        "geometric mean": geometric,
        "vespo": gamma_weighted,
        "kl cov": covariant,
        "clipped only": bounded,
        "cispo without clipped": not_clipped,
        "row_rejection": rejected,
        "dual_clip_side": both_sides,
    }.get(value if setting == "loss" else setting, trusted)
