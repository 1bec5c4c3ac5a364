"""Formulas of the faults that came with the fifth list, a second time, from a header and arrays alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.parity_outside.batches import Array
from tests.parity_outside.second import compute_advantages

_Entries = dict[tuple[int, int], float]


def compute_ported(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    """The first field that the fault changes; NaN where the formula says nothing, empty where there is none."""
    numbers = {name: array.astype(float) if array.dtype.kind == "f" else array for name, array in arrays.items()}
    for formula in (_mask, _kl, _advantages, _returns, _weights, _token_loss, _loss):
        result = formula(setting, value, header, numbers)
        if result:
            return result
    return {}


def _tokens(arrays: dict[str, Array]) -> list[tuple[int, int]]:
    return [(int(row), int(column)) for row, column in np.argwhere(arrays["mask"] > 0)]


def _field(arrays: dict[str, Array], entries: _Entries) -> Array:
    result = np.full(arrays["mask"].shape, np.nan)
    for position, entry in entries.items():
        result[position] = entry
    return result


def _mask(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    if (setting, value) != ("mask", "after the longest prompt"):
        return {}
    first = max(arrays["prompt_lengths"])
    columns = range(arrays["mask"].shape[1])
    return {"mask": np.array([[float(first <= column < end) for column in columns] for end in arrays["lengths"]])}


def _advantages(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    rewards, ids = list(arrays["rewards"]), list(arrays["group_ids"])
    if (setting, value) == ("advantage_rows", "moved by one"):
        normal = compute_advantages(header, arrays)
        return {} if normal is None else {"advantages": np.array([normal[row - 1] for row in range(len(ids))])}
    if (setting, value) == ("kl_place", "reward"):
        taken = [
            sum(arrays["kl"][row, column] for other, column in _tokens(arrays) if other == row)
            for row in range(len(ids))
        ]
        lower = arrays["rewards"] - header["kl"]["coef"] * np.array(taken)
        normal = compute_advantages(header, {**arrays, "rewards": lower})
        return {} if normal is None else {"advantages": normal}
    if (setting, value) == ("scale", "others std"):
        result = []
        for row, reward in enumerate(rewards):
            others = [rewards[other] for other in range(len(ids)) if ids[other] == ids[row] and other != row]
            center = (sum(others) + reward) / (len(others) + 1)
            eps = {"trl": 1e-4, "openrlhf": 1e-9}.get(header["system"], 1e-6)
            result.append((reward - center) / (statistics.stdev(others) + eps))
        return {"advantages": np.array(result)}
    if (setting, value) == ("reward_transform", "whole numbers") and header["system"] == "prime-rl":
        cut_off = [float(int(reward)) for reward in rewards]
        means = [statistics.fmean(cut_off[row] for row in range(len(ids)) if ids[row] == group) for group in ids]
        return {"advantages": np.array(cut_off) - np.array(means)}
    return {}


def _kl(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    if (setting, value) != ("kl_place", "loss"):
        return {}
    difference = arrays["log_probs"] - arrays["ref_log_probs"]
    return {"kl": _field(arrays, {position: difference[position] for position in _tokens(arrays)})}


def _returns(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    """Discounted sums of the score and of the KL in the reward, whitened."""
    named = (setting, value) in (
        ("whiten_over", "ranks"),
        ("whiten_parts", "mean added back"),
        ("reward_column", "after the end"),
        ("reward_transform", "standardized"),
    )
    if not named or header.get("kl", {}).get("place") != "reward":
        return {}
    rewards, ids = list(arrays["rewards"]), list(arrays["group_ids"])
    if value == "standardized":
        center, spread = statistics.fmean(rewards), statistics.stdev(rewards)
        rewards = [(reward - center) / spread for reward in rewards]
    if header["system"] == "openrlhf":
        means = {group: statistics.fmean(rewards[row] for row in range(len(ids)) if ids[row] == group) for group in ids}
        rewards = [reward - means[group] for reward, group in zip(rewards, ids, strict=True)]
    gamma = header["advantage"].get("gamma", 1.0)
    sums: _Entries = {}
    for row, end in enumerate(arrays["lengths"]):
        following = 0.0
        for column in reversed(range(arrays["prompt_lengths"][row], end)):
            # After the end there is a column to lose the score in, but for rows that fill the batch.
            lost = value == "after the end" and end < arrays["mask"].shape[1]
            score = rewards[row] if column == end - 1 and not lost else 0.0
            following = score - header["kl"]["coef"] * arrays["kl"][row, column] + gamma * following
            sums[row, column] = following
    parts: list[_Entries] = [sums]
    if value == "ranks":
        parts = [{position: entry for position, entry in sums.items() if position[0] % 2 == rank} for rank in range(2)]
    whitened: _Entries = {}
    for part in parts:
        center = statistics.fmean(part.values())
        deviation = statistics.pstdev if header["system"] == "openrlhf" else statistics.stdev
        scale = math.sqrt(deviation(part.values()) ** 2 + 1e-8)
        back = center if value == "mean added back" else 0.0
        whitened |= {position: (entry - center) / scale + back for position, entry in part.items()}
    return {"advantages": _field(arrays, whitened)}


def _bounded(header: dict[str, Any], ratio: float) -> float:
    bounds = header["correction"]
    return min(max(ratio, bounds.get("lower", 0.0)), bounds["upper"])


def _weights(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    if "correction" not in header:
        return {}
    old, sampled = arrays["old_log_probs"], arrays["rollout_log_probs"]
    weights = {position: _bounded(header, math.exp(old[position] - sampled[position])) for position in _tokens(arrays)}
    if setting == "rollout_fill":
        for row, end in enumerate(arrays["lengths"]):
            if arrays["mask"][row, end - 1]:
                missing = 0.0 if value == "zero" else old[row, end - 1]
                weights[row, end - 1] = _bounded(header, math.exp(old[row, end - 1] - missing))
        return {"weights": _field(arrays, weights)}
    if (setting, value) == ("correction_mean_one", "all columns"):
        mean = sum(weights.values()) / arrays["mask"].size
        return {"weights": _field(arrays, {position: weight / mean for position, weight in weights.items()})}
    return {}


def _token_loss(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    current, old, sampled = (arrays[name] for name in ("log_probs", "old_log_probs", "rollout_log_probs"))
    tokens, advantages, loss = _tokens(arrays), arrays["advantages"], header["loss"]

    def mean(difference: Array, row: int, columns: Sequence[int]) -> float:
        return statistics.fmean(float(difference[row, column]) for column in columns)

    def trained(row: int) -> list[int]:
        return [column for other, column in tokens if other == row]

    def log_clipped(row: int, column: int) -> float:
        delta = current[row, column] - old[row, column]
        bounded = min(max(delta, -loss["clip_low"]), loss["clip_high"])
        return max(-advantages[row] * math.exp(delta), -advantages[row] * math.exp(bounded))

    def gate(row: int, column: int) -> float:
        tau = loss["tau_positive"] if advantages[row] > 0 else loss["tau_negative"]
        ratio = math.exp(current[row, column] - old[row, column])
        return -advantages[row] * current[row, column] / (1 + math.exp(-tau * (ratio - 1)))

    def row_clipped(row: int, column: int) -> float:
        ratio = math.exp(mean(current - old, row, range(arrays["prompt_lengths"][row], current.shape[1])))
        bounded = min(max(ratio, 1 - loss["clip_low"]), 1 + loss["clip_high"])
        return max(-advantages[row] * ratio, -advantages[row] * bounded)

    def cispo(row: int, column: int) -> float:
        ratio = math.exp(current[row, column] - old[row, column])
        bounded = min(max(ratio, 1 - loss["clip_low"]), 1 + loss["clip_high"])
        weight = _bounded(header, math.exp(old[row, column] - sampled[row, column])) if "correction" in header else 1.0
        return -advantages[row] * bounded * current[row, column] * weight

    def in_band(row: int, column: int) -> float:
        far = abs(math.exp(mean(old - sampled, row, trained(row))) - 1) > value
        return 0.0 if far else cispo(row, column)

    def shifted(row: int, column: int) -> float:
        from_column = column - value
        if from_column not in trained(row):
            return 0.0
        if loss.get("function") == "dppo_loss":
            moved = math.exp(current[row, column]) - math.exp(sampled[row, column])
            far = moved > loss["clip_high"] if advantages[row] > 0 else moved < -loss["clip_low"]
            return 0.0 if far else -advantages[row] * math.exp(current[row, column] - sampled[row, column])
        ratio = math.exp(current[row, column] - old[row, column])
        bounded = min(max(ratio, 1 - loss["clip_low"]), 1 + loss["clip_high"])
        difference = current - arrays["ref_log_probs"]
        average = statistics.fmean(float(difference[position]) for position in tokens)
        advantage = advantages[row] + header["kl"]["coef"] * (average - difference[row, from_column])
        return -advantage * bounded * current[row, column]

    formulas: dict[tuple[str, Any], Callable[[int, int], float]] = {
        ("loss", "log clip"): log_clipped,
        ("loss", "sapo unscaled"): gate,
        ("ratio_level", "unmasked mean"): row_clipped,
        ("row_band", value): in_band,
        ("advantage_shift", value): shifted,
    }
    formula = formulas.get((setting, value))
    return (
        {} if formula is None else {"token_loss": _field(arrays, {position: formula(*position) for position in tokens})}
    )


def _loss(setting: str, value: Any, header: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    """The loss from the recorded terms of its tokens, added up with other divisors."""
    tokens, rows = _tokens(arrays), range(len(arrays["mask"]))
    coef = header["kl"]["coef"] if header.get("kl", {}).get("place") == "loss" else 0.0
    policy = {position: arrays["token_loss"][position] for position in tokens}
    kl = {position: coef * arrays["kl"][position] if coef else 0.0 for position in tokens}
    terms = {position: policy[position] + kl[position] for position in tokens}
    counts = [sum(1 for other, _ in tokens if other == row) for row in rows]
    lengths = arrays["lengths"] - arrays["prompt_lengths"]
    cut = [length == max(lengths) for length in lengths]

    def mean_over(positions: list[tuple[int, int]]) -> float:
        return sum(terms[position] for position in positions) / len(positions)

    def parts_of(ids: Sequence[int]) -> list[list[tuple[int, int]]]:
        return [[position for position in tokens if ids[position[0]] == part] for part in sorted(set(ids))]

    def left_out() -> float:
        if value == "no truncated rows":
            return sum(terms[position] for position in tokens if not cut[position[0]]) / len(tokens)
        ends = {(row, arrays["lengths"][row] - 1) for row in rows if not cut[row]}
        filled = [row for row in rows if counts[row]]
        sums = [
            sum(terms[position] for position in tokens if position[0] == row and position not in ends) for row in filled
        ]
        return statistics.fmean(total / counts[row] for total, row in zip(sums, filled, strict=True))

    def pairs() -> float:
        means = [
            mean_over([position for position in tokens if position[0] in (row, row + 1)])
            for row in range(0, len(rows) - 1, 2)
        ]
        of_rows = [sum(kl[row, column] for other, column in tokens if other == row) / counts[row] for row in rows]
        return (
            statistics.fmean(means)
            - sum(kl[position] / _pair_size(position, counts) for position in tokens) / len(means)
            + (statistics.fmean(of_rows))
        )

    def trusted() -> float:
        loss, total = header["loss"], 0.0
        for row, column in tokens:
            moved = math.exp(arrays["log_probs"][row, column]) - math.exp(arrays["rollout_log_probs"][row, column])
            positive = arrays["advantages"][row] > 0
            far = moved > loss["clip_high"] if positive else moved < -loss["clip_low"]
            total += policy[row, column] + (0.0 if far else kl[row, column])
        return total / len(tokens)

    def parted_kl() -> float:
        parts = [[row for row in rows if arrays["micro_batch_ids"][row] == part] for part in (0, 1)]
        of_rows = [sum(kl[row, column] for other, column in tokens if other == row) / counts[row] for row in rows]
        losses = [sum(policy[row, column] for other, column in tokens if other == row) / counts[row] for row in rows]
        return statistics.fmean(losses) + statistics.fmean(
            statistics.fmean(of_rows[row] for row in part) for part in parts
        )

    def unequal() -> float:
        ids, rewards = arrays["group_ids"], arrays["rewards"]
        spread = {group: len(set(rewards[ids == group])) > 1 for group in set(ids)}
        return sum(terms.values()) / sum(count for row, count in enumerate(counts) if spread[ids[row]])

    def doubled() -> float:
        positions = tokens + [position for position in tokens if position[0] < value]
        return mean_over(positions)

    formulas: dict[tuple[str, Any], Callable[[], float]] = {
        ("rank_means", value): lambda: statistics.fmean(
            mean_over(part) for part in parts_of([row % value for row in rows])
        ),
        ("numerator_mask", value): left_out,
        ("divisor_mask", "no equal groups"): unequal,
        ("repeated_rows", value): doubled,
        ("reduction", "token_mean_min_one"): lambda: sum(terms.values()) / sum(max(count, 1) for count in counts),
        ("reduction", "token_mean_of_pairs"): pairs,
        ("kl_on_trusted", True): trusted,
        ("kl_micro_batches", True): parted_kl,
    }
    formula = formulas.get((setting, value))
    return {} if formula is None else {"loss": np.array(formula())}


def _pair_size(position: tuple[int, int], counts: list[int]) -> float:
    """The tokens of the micro-batch of two rows that a token is in; a row that is left over has infinitely many."""
    first = position[0] - position[0] % 2
    return counts[first] + counts[first + 1] if first + 1 < len(counts) else math.inf
