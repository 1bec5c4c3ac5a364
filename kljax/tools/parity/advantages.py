"""The stage of the advantages: from rewards and groups, with a KL in the reward or in the advantage."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from kljax.systems import Call
from kljax.tools.parity.dump import DumpError
from kljax.tools.parity.policies import kl_policy, kl_terms
from kljax.tools.parity.positions import apply_rule, last_positions, over_tokens, tokens_after
from kljax.tools.parity.recipe import AdvantageStep, Kl, Recipe
from kljax.tools.parity.replay import MissingFields, Prediction, Replay, run_call
from kljax.tools.parity.rounding import PRODUCTS, accumulator, tree_height

ByRewards = Callable[[np.ndarray], np.ndarray]
"""The advantages as a function of the rewards of the rows."""
# The group of each row, by its recorded group, numbered from 0, and its place before a shuffle.
GROUPINGS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "recorded": lambda ids, places: ids,
    "interleaved": lambda ids, places: places % (int(ids.max()) + 1),
    "consecutive": lambda ids, places: places // max(len(ids) // (int(ids.max()) + 1), 1),
    "batch": lambda ids, places: np.zeros_like(ids),
}
# What is subtracted from the rewards of a group, by these and by all rewards.
CENTERS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "none": lambda members, batch: 0.0,
    "batch": lambda members, batch: batch.mean(),
    "median": lambda members, batch: np.median(members),
    "others": lambda members, batch: members.mean(),
}


def advantages(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the advantages from rewards and groups, with the KL of a term in the reward.

    A KL in the reward is taken off where the system does so: after the comparison of the rewards if the call of the
    header subtracts it there, else before. Groups of which rows are missing are not compared.

    Raises:
      DumpError: if advantages recorded per row are computed per token, and differ within a row.
    """
    if replay is not replay.batch:
        return Prediction(*(array[replay.rows] for array in replay.batch.predict("advantages", recipe)))
    step = recipe.advantage
    unit = replay.unit("advantages", recipe)
    used = replay.used_mask(recipe)
    call = replay.call("advantage", recipe)
    needed = ("rewards", *(name for name in call.required if name == "group_ids"))
    if missing := [name for name in needed if name not in replay.arrays]:
        raise MissingFields(*missing)
    ids, count, complete = grouped(replay, step.groups)
    subtracts = any(then.function == "subtract_kl" for then in call.then)
    rewards = step.reward_scale * replay.arrays["rewards"]
    charge = _kl_in_reward(replay, recipe, used)
    last = used & (np.arange(replay.shape[1]) == last_positions(used)[:, None])
    token_rewards = np.where(last, rewards[:, None], 0) - charge
    if step.kl_coef:
        rewards = rewards - step.kl_coef * _second_kl(replay, recipe, used)
    if not subtracts or recipe.kl.early:
        rewards = rewards - charge.sum(1)
        charge = np.zeros(replay.shape)
    shaped = {"rewards": rewards, "group_ids": ids, "mask": used, "kl": charge, "token_rewards": token_rewards}
    renamed = {name: replay.array_name("advantage", name) for name in call.required}
    arrays = replay.inputs("advantage") | shaped
    arrays |= {name: shaped[field] for name, field in renamed.items() if field in shaped}
    # The recorded rewards stand under these arguments; GAE has those of its tokens.
    names = ["rewards", *(name for name in renamed if renamed[name] == "rewards")]
    if call.function == "gae":
        arrays["rewards"] = token_rewards
        names = []
    keywords: dict[str, Any] = {"coef": 1.0} if subtracts else {}
    keywords |= {} if "num_groups" in call.arguments else {"num_groups": count}

    def compute(rewards: np.ndarray) -> np.ndarray:
        if step.center == "mean":
            return replay.run("advantage", recipe, arrays | dict.fromkeys(names, rewards), **keywords)
        # Each row is a group of its own, so that the function returns the row as it is.
        compared = {"rewards": _centered_rewards(step, call, rewards, ids), "group_ids": np.arange(len(ids))}
        identity = {"scale": "none", "singleton": "reward"}
        plain = dataclasses.replace(call, function="grpo_advantages", arguments=identity)
        return run_call("advantage", plain, arrays | compared, **keywords | {"num_groups": len(ids)})

    value = compute(rewards)
    if step.center == "mean" and call.function in ("gae", "reinforce_plus_plus_returns"):
        bound = _bound_of_returns(call, arrays, value, unit, used)
    else:
        bound = _bound(compute, rewards, ids, value, unit, kl=charge)
    if step.root:
        factor = _root_factor(call, rewards, ids)
        value, bound = (array * (factor if array.ndim == 1 else factor[:, None]) for array in (value, bound))
    value, bound = _changed(step, value, bound, used)
    mask = replay.arrays["mask"] & used & complete[:, None]
    if "advantages" in replay.arrays and replay.arrays["advantages"].ndim == 1:
        rows = np.asarray(replay.arrays["mask"].any(1) & complete)
        return Prediction(value, bound, rows) if value.ndim == 1 else _of_rows(value, bound, mask)
    return Prediction(over_tokens(value, replay.shape), over_tokens(bound, replay.shape), mask)


def grouped(replay: Replay, grouping: str = "recorded") -> tuple[np.ndarray, int, np.ndarray]:
    """Finds the groups of rows: without recorded ones, each row is one.

    Returns the group of each row, `[B]` from 0, their number, and the rows whose group is complete, `[B]` bool.
    """
    recorded = replay.arrays["group_ids"] if "group_ids" in replay.arrays else np.arange(replay.shape[0])
    _, ids = np.unique(recorded, return_inverse=True)
    places = np.argsort(np.argsort(replay.arrays["row_ids"])) if "row_ids" in replay.arrays else np.arange(len(ids))
    sizes = np.bincount(ids)
    complete = sizes[ids] >= (replay.dump.header.get("group_size") or 0)
    return GROUPINGS[grouping](ids, places), len(sizes) if grouping == "recorded" else len(ids), complete


def token_advantages(replay: Replay, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Returns the advantages of tokens, recorded or recomputed, with a KL in the advantage, and their bounds."""
    value, bound = (over_tokens(array, replay.shape) for array in replay.input("advantages", recipe))
    kl = recipe.kl
    if kl.place != "advantage":
        return value, bound
    # The mean KL of the batch less the KL of each token; a mask of the loss alone does not reach the mean.
    used = replay.arrays["mask"]
    values, errors = (np.where(used, array, 0) for array in replay.input("kl", recipe))

    def total() -> tuple[float, float]:
        each = [(part.input("kl", recipe)[0], part.arrays["mask"]) for part in replay.batch.parts()]
        return float(sum(np.where(mask, x, 0).sum() for x, mask in each)), float(sum(mask.sum() for _, mask in each))

    key = ("kl sum", recipe.mask, recipe.ratio, dataclasses.replace(kl, coef=0.0))
    whole_sum, count = replay.batch.remember(key, total)
    mean = whole_sum / max(count + replay.recipe.reduction.eps_batch, 1) if kl.centered else 0.0
    unit = replay.unit("token_loss", recipe)
    result = value + np.where(used, kl.coef * (mean - values), 0)
    height = accumulator(unit) * tree_height(int(count)) + PRODUCTS * unit
    extra = abs(kl.coef) * (errors + errors.max() + height * np.abs(values).max())
    return result, bound + extra + unit * np.abs(result)


def _centered_rewards(step: AdvantageStep, call: Call, rewards: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Compares the rewards of each group in a way that no function of the library has, `[B]`."""
    result = np.zeros(len(rewards))
    ddof, eps, scale = (call.arguments.get(name, value) for name, value in (("ddof", 1), ("eps", 1e-6), ("scale", "")))
    for group in np.unique(ids):
        rows = ids == group
        members = rewards[rows]
        result[rows] = members - CENTERS[step.center](members, rewards)
        if step.center == "others" and len(members) > 1:
            result[rows] *= len(members) / (len(members) - 1)
        spread = rewards if scale == "batch_std" else members
        if scale not in ("", "none") and len(spread) > ddof:
            result[rows] /= spread.std(ddof=ddof) + eps
    return result


def _distances(rewards: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns the distance of each reward to the mean of its group, `[B]`."""
    return np.asarray(rewards - (np.bincount(ids, rewards) / np.maximum(np.bincount(ids), 1))[ids])


def _root_factor(call: Call, rewards: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns what epsilon in the variance, not at the standard deviation, multiplies each row with, `[B]`."""
    ddof = call.arguments.get("ddof", 1)
    eps = call.arguments.get("eps", 1e-6)
    if call.arguments.get("scale", "std") == "batch_std":
        spread = np.full(len(rewards), rewards.std(ddof=ddof))
    else:
        squares = np.bincount(ids, _distances(rewards, ids) ** 2)
        spread = np.sqrt(squares / np.maximum(np.bincount(ids) - ddof, 1))[ids]
    return np.asarray((spread + eps) / np.sqrt(np.maximum(spread**2 + eps, 1e-300)))


def _of_rows(value: np.ndarray, bound: np.ndarray, at: np.ndarray) -> Prediction:
    """Returns the number of each row, which all its tokens have."""
    first = at.argmax(1)[:, None]
    first_value, limit = (np.take_along_axis(array, first, 1)[:, 0] for array in (value, bound))
    differs = at & (np.abs(value - first_value[:, None]) > bound + limit[:, None])
    if differs.any():
        row, token = (int(i) for i in np.argwhere(differs)[0])
        raise DumpError(
            f"advantages: got one number per row, expected [B, T], as those of header.advantage differ within a row, "
            f"first at (row, token) ({row}, {token}); record one number per token"
        )
    return Prediction(first_value, limit, np.asarray(at.any(1)))


def _kl_in_reward(replay: Replay, recipe: Recipe, used: np.ndarray) -> np.ndarray:
    """Returns what a KL in the reward takes off at each token, `[B, T]`."""
    if recipe.kl.place != "reward":
        return np.zeros(replay.shape)
    charged = apply_rule(used, recipe.kl_mask, replay.layout)
    return recipe.kl.coef * np.where(charged, replay.input("kl", recipe)[0], 0)


def _second_kl(replay: Replay, recipe: Recipe, used: np.ndarray) -> np.ndarray:
    """Returns the KL of each row that a step takes off the reward besides the header's term, `[B]`."""
    policy = "old_log_probs" if "old_log_probs" in replay.arrays else "log_probs"
    kl = Kl(estimator=recipe.advantage.kl_estimator, policy=policy)
    key = ("second kl", kl, recipe.mask, recipe.ratio)
    values = replay.remember(key, lambda: kl_terms(replay, kl_policy(replay, kl), kl, used, recipe.ratio)[0])
    return np.asarray(np.where(used, values, 0).sum(1))


def _changed(
    step: AdvantageStep, value: np.ndarray, bound: np.ndarray, used: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Applies the settings of a step that no function of the library has."""
    if step.per_length:
        lengths = np.maximum(used.sum(1), 1)
        factor = 1 / (lengths if value.ndim == 1 else lengths[:, None])
        value = value * factor
        bound = bound * factor
    if step.discount != 1:
        factor = np.where(used, step.discount ** np.maximum(tokens_after(used) - 1, 0), 0)
        value, bound = (over_tokens(array, used.shape) * factor for array in (value, bound))
    if step.whiten != "none":
        rows = step.whiten == "rows" and value.ndim == 1
        members = value[used.any(1)] if rows else over_tokens(value, used.shape)[used]
        spread = members.std(ddof=step.whiten_ddof) + step.whiten_eps
        typical = 2 * over_tokens(bound, used.shape)[used].mean()
        value = (value - members.mean()) / spread
        bound = (bound + typical + np.abs(value) * typical) / spread
    value = step.scale * value
    return (value if step.clip is None else np.clip(value, -step.clip, step.clip)), abs(step.scale) * bound


def _bound_of_returns(
    call: Call, arrays: dict[str, Any], value: np.ndarray, unit: float, used: np.ndarray
) -> np.ndarray:
    """Carries the rounding of sums from the end of a row through whitening, `[B, T]`."""
    values = np.abs(arrays["values"]) if call.function == "gae" else np.zeros(used.shape)
    magnitude = np.where(used, np.abs(arrays["token_rewards"]) + 2 * values, 0).sum(1, keepdims=True)
    bound = unit * (PRODUCTS + 2 * tree_height(used.shape[1])) * magnitude
    if any(step.function == "masked_whiten" for step in call.then):
        plain = run_call("advantage", dataclasses.replace(call, then=()), arrays)
        spread = max(float(plain[used].std()), 1e-30)
        bound = (bound + bound.mean()) / spread * (1 + np.abs(value)) + unit * PRODUCTS * np.abs(value)
    return np.broadcast_to(bound, value.shape)


def _bound(
    compute: ByRewards, rewards: np.ndarray, ids: np.ndarray, value: np.ndarray, unit: float, *, kl: np.ndarray
) -> np.ndarray:
    """Carries the rounding of the mean through a centred, scaled advantage, and that of a KL taken off after it.

    A distance to the mean of `n` rewards of at most `R` has an error of `u R (n + 2)`; the advantage multiplies it by
    its own ratio to the distance, and divides by a standard deviation whose relative error is at most twice the
    distance's error over it. Sums of the KL from the end have the error of a sum. Where the rewards of a group differ
    by no more than the error, `compute` tells how large it makes their advantages.
    """
    per_row = np.abs(value if value.ndim == 1 else np.abs(value).max(1))
    sizes = np.bincount(ids)
    largest = np.zeros(len(sizes))
    np.maximum.at(largest, ids, np.abs(rewards))
    distance = np.abs(_distances(rewards, ids))
    error = unit * (largest[ids] * (sizes[ids] + 2))
    spread = np.sqrt(np.bincount(ids, distance**2) / np.maximum(sizes, 1))[ids]
    gain = np.max(per_row / np.maximum(distance, 1e-30), where=distance > 4 * error, initial=0.0)
    # A group of equal rewards has advantages of 0.
    relative = np.where(spread > error, np.minimum(2 * error / np.maximum(spread, 1e-30), 1), 0)
    bound = error * max(gain, 1) + per_row * (relative + unit * (PRODUCTS + sizes[ids]))
    tied = (spread <= 2 * error) & ~_exact_means(rewards, ids, unit)
    if tied.any():
        # How far a moved reward of a group moves the advantages of the group.
        _, first = np.unique(ids, return_index=True)
        moved = rewards.copy()
        moved[first] += np.where(tied, error, 0)[first]
        change = np.abs(compute(moved) - value)
        noise = np.zeros(len(sizes))
        np.maximum.at(noise, ids, change if change.ndim == 1 else change.max(1))
        # The moved reward keeps at least half of its error, as the mean of its group moves along.
        bound = bound + np.where(tied, 2 * noise[ids], 0)
    if value.ndim == 1:
        return bound
    sums = np.abs(kl).sum(1) * unit * (PRODUCTS + tree_height(kl.shape[1]))
    return np.broadcast_to((bound + sums)[:, None], value.shape)


def _exact_means(rewards: np.ndarray, ids: np.ndarray, unit: float) -> np.ndarray:
    """Tells of which rows the group has equal rewards whose sums need no rounding, `[B]` bool."""
    scale = 1 / accumulator(unit)
    exact = np.zeros(len(rewards), bool)
    for group in np.unique(ids):
        rows = ids == group
        sums = rewards[rows][0] * np.arange(1, rows.sum() + 1)
        exact[rows] = np.ptp(rewards[rows]) == 0 and bool((np.frexp(sums)[0] * scale % 1 == 0).all())
    return exact
