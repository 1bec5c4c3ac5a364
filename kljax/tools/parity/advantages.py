"""The stage of the advantages: from rewards and groups, with a KL in the reward or in the advantage."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from kljax.systems import Call
from kljax.tools.parity.calls import run_call
from kljax.tools.parity.comparisons import REWARDS, compare_rewards, grouped, is_other, root_factor, whitened
from kljax.tools.parity.dump import DumpError
from kljax.tools.parity.policies import kl_at, kl_policy
from kljax.tools.parity.positions import ROW_ORDERS, apply_rule, last_positions, over_tokens, shift_rows
from kljax.tools.parity.recipe import AdvantageStep, Kl, Recipe
from kljax.tools.parity.replay import Prediction, Replay
from kljax.tools.parity.rounding import PRODUCTS, accumulator, tree_height


def _every(count: int) -> Callable[[Replay], np.ndarray]:
    """Takes every so many-th row together."""
    return lambda replay: np.arange(replay.shape[0]) % count


# The rows that a system's own whitening takes together, besides the whole batch: a number for each row.
WHITENED_TOGETHER: dict[str, Callable[[Replay], np.ndarray]] = {
    "micro-batches": lambda replay: replay.arrays.get("micro_batch_ids", np.zeros(replay.shape[0])),
    "groups": lambda replay: replay.arrays["group_ids"],
    **{f"rows of {count} processes": _every(count) for count in (2, 3, 4, 8)},
}


def advantages(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the advantages from rewards and groups, with the KL of a term in the reward.

    A KL in the reward is taken off where the system does so: after the comparison of the rewards if the call of the
    header subtracts it there, else before.

    Args:
      replay: the recorded arrays, among them `rewards` and `group_ids`.

    Returns:
      A `Prediction`, `[B, T]`, or `[B]` if the advantages are recorded per row. It is compared at tokens in the
      recorded mask and in that of the recipe, or at rows with an unmasked token.

    Raises:
      DumpError: if advantages recorded per row are computed per token, and differ within a row.
    """
    step, unit = recipe.advantage or AdvantageStep(), replay.unit("advantages", recipe)
    used = replay.used_mask(recipe)
    parts = replay.arrays.get("micro_batch_ids", np.zeros(len(used), int))
    ids, count = grouped(replay.arrays["group_ids"], step.groups, parts)
    call = replay.call("advantage", step)
    after = any(then.function == "subtract_kl" for then in call.then) and not (recipe.kl or Kl()).early
    rewards, kl = _shaped_rewards(replay, recipe, after, step)
    shaped = {"rewards": rewards, "group_ids": ids, "mask": used, "kl": kl}
    shaped["token_rewards"] = _token_rewards(replay, recipe, used, step)
    renamed = {name: replay.array_name("advantage", name) for name in call.required}
    arrays = replay.inputs("advantage") | shaped
    arrays |= {name: shaped[field] for name, field in renamed.items() if field in shaped}
    if call.function == "gae":
        arrays["rewards"] = shaped["token_rewards"]
        arrays["values"] = shift_rows(arrays["values"], step.values_shift)
        if step.bootstrap:
            following = np.where(_at_last(used) & cut_rows(replay)[:, None], arrays["values"], 0)
            arrays["rewards"] = arrays["rewards"] + call.arguments.get("gamma", 1.0) * following
    keywords: dict[str, Any] = {"coef": 1.0} if any(then.function == "subtract_kl" for then in call.then) else {}
    keywords |= {} if "num_groups" in call.arguments else {"num_groups": count}

    # The recorded rewards stand under these arguments; GAE has those of its tokens.
    names = () if call.function == "gae" else ("rewards", *(name for name in renamed if renamed[name] == "rewards"))
    replaced, sizes = is_other(step), used.sum(1)

    def compute(rewards: np.ndarray) -> np.ndarray:
        if not replaced:
            inputs = arrays | dict.fromkeys(names, rewards)
            return np.asarray(_run(replay, step, inputs, keywords), np.float64)
        # Each row is a group of its own, so that the function returns the row as it is.
        values = compare_rewards(step, call, rewards, ids, sizes=sizes, cut=cut_rows(replay), parts=parts)
        compared = {"rewards": values, "group_ids": np.arange(len(ids))}
        identity = {"scale": "none", "singleton": "reward"}
        plain = dataclasses.replace(call, function="grpo_advantages", arguments=identity)
        alone = keywords | {"num_groups": len(ids)}
        return np.asarray(run_call("advantage", plain, arrays | compared, **alone), np.float64)

    value = compute(rewards)
    if not replaced and call.function in ("gae", "reinforce_plus_plus_returns"):
        bound = _bound_of_returns(call, arrays, value, unit, used)
    else:
        bound = _bound(compute, rewards, ids, value, unit=unit, kl=kl)
    if step.root:
        factor = root_factor(call, rewards, ids)
        value, bound = (array * (factor if array.ndim == 1 else factor[:, None]) for array in (value, bound))
    value, bound = _changed(step, value, bound, used)
    order = ROW_ORDERS[step.rows](replay.layout)
    value, bound = value[order], bound[order]
    if step.place == "last":
        value, bound = (np.where(_at_last(used), over_tokens(array, replay.shape), 0) for array in (value, bound))
    mask: np.ndarray = replay.arrays["mask"]
    if "advantages" in replay.arrays and replay.arrays["advantages"].ndim == 1:
        rows = Prediction(value, bound, np.asarray(mask.any(1)))
        return rows if value.ndim == 1 else _of_rows(value, bound, np.asarray(mask & used))
    value, bound = (over_tokens(array, replay.shape) for array in (value, bound))
    return Prediction(value, bound, np.asarray(mask & used))


def _run(replay: Replay, step: AdvantageStep, arrays: dict[str, Any], keywords: dict[str, Any]) -> Any:
    """Runs the call of the header, but for a step of its own: returns in place of advantages, or another whitening."""
    if not step.returns and not step.forward and (step.whitening, step.whiten_over) == ("both", "batch"):
        return replay.run("advantage", step, arrays, **keywords)
    call, mask = replay.call("advantage", step), arrays["mask"]
    before = [inner for inner in call.then if inner.function != "masked_whiten"]
    after = call.then[len(before) :]
    value = _forward(call, before, arrays, keywords) if step.forward else None
    if value is None:
        plain = dataclasses.replace(call, then=tuple(before))
        value = np.asarray(run_call("advantage", plain, arrays, **keywords), np.float64)
    if step.returns:
        value = value + arrays["values"]
    ids: np.ndarray | None = None
    if step.whiten_over in WHITENED_TOGETHER:
        ids = WHITENED_TOGETHER[step.whiten_over](replay)
    for inner in after:
        value = over_tokens(value, mask.shape).copy()
        for rows in [slice(None)] if ids is None else [ids == part for part in np.unique(ids)]:
            value[rows] = whitened(value[rows], mask[rows], inner, step.whitening)
    return value


def _forward(call: Call, before: list[Call], arrays: dict[str, Any], keywords: dict[str, Any]) -> np.ndarray | None:
    """Sums the rewards of tokens from the first one on, `[B, T]`; None if the call has no returns."""
    names = [call.function, *(inner.function for inner in before)]
    if "reinforce_plus_plus_returns" not in names:
        return None
    position, mask = names.index("reinforce_plus_plus_returns"), arrays["mask"]
    summed = before[position - 1] if position else call
    rewards = arrays["token_rewards"]
    if position:
        plain = dataclasses.replace(call, then=tuple(before[: position - 1]))
        rewards = np.asarray(run_call("advantage", plain, arrays, **keywords), np.float64)
        if rewards.ndim == 1:
            rewards = np.where(_at_last(mask), rewards[:, None], 0)
    result, running = np.zeros(mask.shape), np.zeros(len(mask))
    for column in range(mask.shape[1]):
        used = mask[:, column]
        running = np.where(used, rewards[:, column] + summed.arguments.get("gamma", 1.0) * running, running)
        result[:, column] = np.where(used, running, 0)
    return result


def cut_rows(replay: Replay) -> np.ndarray:
    """Returns the rows that are cut at the limit, `[B]` bool."""
    return np.asarray(~replay.layout.complete & replay.arrays["mask"].any(1))


def token_advantages(replay: Replay, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Returns the advantages of tokens, recorded or recomputed, with a KL in the advantage, and their bounds.

    Returns:
      `[B, T]` advantages and `[B, T]` bounds; a bound is 0 where the advantage is recorded and no KL is added.
    """
    value, bound = (over_tokens(array, replay.shape) for array in replay.input("advantages", recipe))
    if recipe.kl is not None and recipe.kl.place == "advantage":
        return _centered(replay, recipe, value, bound)
    return value, bound


def _of_rows(value: np.ndarray, bound: np.ndarray, at: np.ndarray) -> Prediction:
    """Returns the number of each row, which all its tokens have."""
    first, rows = at.argmax(1)[:, None], np.asarray(at.any(1))
    first_value, limit = (np.take_along_axis(array, first, 1)[:, 0] for array in (value, bound))
    differs = at & (np.abs(value - first_value[:, None]) > bound + limit[:, None])
    if differs.any():
        row, token = (int(i) for i in np.argwhere(differs)[0])
        raise DumpError(
            f"advantages: got one number per row, expected [B, T], as those of header.advantage differ within a row, "
            f"first at (row, token) ({row}, {token}); record one number per token"
        )
    return Prediction(first_value, limit, rows)


def _shaped_rewards(replay: Replay, recipe: Recipe, after: bool, step: AdvantageStep) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rewards that are compared, `[B]`, and the KL per token that is taken off after, `[B, T]`."""
    rewards, kl, used = _changed_rewards(replay, step), recipe.kl, replay.used_mask(recipe)
    if step.kl_coef:
        rewards = rewards - step.kl_coef * np.where(used, _second_kl(replay, step, used), 0).sum(1)
    if kl is None or kl.place != "reward":
        return rewards, np.zeros(replay.shape)
    if kl.padded:
        position = np.arange(replay.shape[1])
        first = np.where(used.any(1), used.argmax(1), replay.shape[1])
        used = position >= first[:, None]
    used = apply_rule(used, recipe.kl_mask, replay.layout)
    values = kl.coef * np.where(used, _kl_values(replay, recipe, used), 0)
    if kl.padded and after:
        # Sums from the end reach every token of the row, so that the last one may carry them.
        inside = replay.used_mask(recipe)
        values[np.arange(len(values)), last_positions(inside)] += np.where(inside, 0, values).sum(1)
    values = _moved_kl(kl, values, replay.used_mask(recipe))
    return (rewards, values) if after else (rewards - values.sum(1), np.zeros(replay.shape))


def _changed_rewards(replay: Replay, step: AdvantageStep) -> np.ndarray:
    rewards: np.ndarray = replay.arrays["rewards"][ROW_ORDERS[step.reward_rows](replay.layout)]
    sizes = replay.layout.sizes
    if step.rewards in REWARDS:
        rewards = REWARDS[step.rewards](rewards, sizes)
    if step.length_penalty:
        rewards = rewards - step.length_penalty * sizes / max(sizes.max(), 1)
    if step.buffer is not None:
        rewards = rewards + np.minimum((sizes.max() - sizes) / step.buffer - 1, 0)
    rewards = step.reward_scale * rewards
    if step.reward_clip is not None:
        rewards = np.clip(rewards, -step.reward_clip, step.reward_clip)
    cut = cut_rows(replay)
    rewards = rewards - step.cut_penalty * cut
    return rewards if step.cut_reward is None else np.where(cut, step.cut_reward, rewards)


def _second_kl(replay: Replay, step: AdvantageStep, used: np.ndarray) -> np.ndarray:
    """Returns the KL per token of a penalty that the header does not have: of the policy that sampled."""
    policy = "old_log_probs" if "old_log_probs" in replay.arrays else "log_probs"
    kl = Kl(estimator=step.kl_estimator, policy=policy)
    values: np.ndarray = replay.remember(
        ("second kl", kl, used.tobytes()), lambda: kl_at(replay, kl_policy(replay, kl), kl, used)
    )
    return values


def _moved_kl(kl: Kl, values: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Returns the KL in the reward where a system charges it, `[B, T]`."""
    if kl.per_length:
        values = values / np.maximum(used.sum(1, keepdims=True), 1)
    return shift_rows(_at_end(values, used) if kl.at_end else values, kl.moved)


def _at_last(used: np.ndarray) -> np.ndarray:
    """Returns the last token of each row, `[B, T]` bool."""
    return np.asarray(used & (np.arange(used.shape[1]) == last_positions(used)[:, None]))


def _at_end(values: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Moves what the tokens of each row have to its last one, `[B, T]`."""
    result = np.zeros(values.shape)
    result[np.arange(len(values)), last_positions(used)] = values.sum(1)
    return result


def _kl_values(replay: Replay, recipe: Recipe, used: np.ndarray) -> np.ndarray:
    """Returns the KL per token, recorded or recomputed, also at tokens that the mask leaves out."""
    kl = recipe.kl or Kl()
    if not kl.padded:
        return replay.input("kl", recipe)[0]
    key = ("padded kl", recipe.mask, dataclasses.replace(kl, coef=0.0))
    values: np.ndarray = replay.remember(key, lambda: kl_at(replay, kl_policy(replay, kl), kl, used))
    return values


def _token_rewards(replay: Replay, recipe: Recipe, used: np.ndarray, step: AdvantageStep) -> np.ndarray:
    """Returns the reward of a row at its last token, less a KL in the reward at each, `[B, T]`."""
    position = np.arange(replay.shape[1])
    # A reward outside the tokens of its row reaches none of them.
    at = {
        "last": last_positions(used)[:, None],
        "before last": np.maximum(last_positions(used) - 1, used.argmax(1))[:, None],
        "first": used.argmax(1)[:, None],
        "last column": position[-1],
        "every": position,
    }
    result = np.where(used & (position == at[step.reward_at]), _changed_rewards(replay, step)[:, None], 0)
    if recipe.kl is not None and recipe.kl.place == "reward":
        charged = apply_rule(used, recipe.kl_mask, replay.layout)
        values = recipe.kl.coef * np.where(charged, _kl_values(replay, recipe, used), 0)
        result = result - _moved_kl(recipe.kl, values, used)
    return result


def _changed(
    step: AdvantageStep, value: np.ndarray, bound: np.ndarray, used: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Applies the settings of a step that no function of the library has."""
    if step.per_length:
        lengths = np.maximum(used.sum(1), 1)
        factor = 1 / (lengths if value.ndim == 1 else lengths[:, None])
        value, bound = value * factor, bound * factor
    if step.discount != 1:
        after = used[:, ::-1].cumsum(1)[:, ::-1] - 1
        factor = np.where(used, step.discount ** np.maximum(after, 0), 0)
        value, bound = (over_tokens(array, used.shape) * factor for array in (value, bound))
    if step.whiten != "none":
        value, bound = _whitened(step, value, bound, used)
    value, bound = step.scale * (value + step.offset), abs(step.scale) * bound
    if step.clip is not None:
        value = np.clip(value, -step.clip, step.clip)
    if step.low is not None or step.high is not None:
        value = np.clip(value, step.low, step.high)
    value, bound = (np.where(value < 0, step.negative, 1) * array for array in (value, bound))
    # Rounding moves a sign only where it may move the number past 0.
    return (np.sign(value), np.where(np.abs(value) <= bound, 2.0, 0)) if step.sign else (value, np.abs(bound))


def _whitened(
    step: AdvantageStep, value: np.ndarray, bound: np.ndarray, used: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Normalises advantages over the tokens, or over the rows."""
    rows = step.whiten == "rows" and value.ndim == 1
    members = value[used.any(1)] if rows else over_tokens(value, used.shape)[used]
    if step.whiten == "mean absolute":
        typical = max(float(np.abs(members).mean()), 1e-30)
        relative = over_tokens(bound, used.shape)[used].mean() / typical
        return value / typical, bound / typical + np.abs(value) / typical * relative
    spread = 1.0 if step.whiten == "centered" else members.std(ddof=step.whiten_ddof) + step.whiten_eps
    result = (value - members.mean()) / spread
    typical = 2 * over_tokens(bound, used.shape)[used].mean()
    return result, (bound + typical) / spread + np.abs(result) * typical / spread


def _centered(replay: Replay, recipe: Recipe, value: np.ndarray, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Adds the mean KL of the batch less the KL of each token."""
    # A mask of the loss alone does not reach the mean.
    kl, used = recipe.kl or Kl(), replay.arrays["mask"]
    values, errors = replay.input("kl", recipe)
    values, errors = np.where(used, values, 0), np.where(used, errors, 0)
    eps = replay.plan.recipe.reduction.eps_batch if kl.mean_eps is None else kl.mean_eps
    axis = 1 if kl.mean == "row" else None
    count = used.sum(axis, keepdims=True)
    mean = values.sum(axis, keepdims=True) / np.maximum(count + eps, 1) if kl.centered else 0.0
    unit = replay.unit("token_loss", recipe)
    result = value + np.where(used, kl.coef * (mean - values), 0)
    height = accumulator(unit) * tree_height(int(used.sum())) + PRODUCTS * unit
    extra = abs(kl.coef) * (errors + errors.max() + height * np.abs(values).max())
    return result, bound + extra + unit * np.abs(result)


def _bound_of_returns(
    call: Call, arrays: dict[str, Any], value: np.ndarray, unit: float, used: np.ndarray
) -> np.ndarray:
    """Carries the rounding of sums from the end of a row through whitening, `[B, T]`."""
    values = np.abs(arrays["values"]) if call.function == "gae" else np.zeros(used.shape)
    magnitude = np.where(used, np.abs(arrays["token_rewards"]) + 2 * values, 0).sum(1, keepdims=True)
    bound = unit * (PRODUCTS + 2 * tree_height(used.shape[1])) * magnitude
    if any(step.function == "masked_whiten" for step in call.then):
        plain = np.asarray(run_call("advantage", dataclasses.replace(call, then=()), arrays), np.float64)
        spread = max(float(plain[used].std()), 1e-30)
        bound = (bound + bound.mean()) / spread * (1 + np.abs(value)) + unit * PRODUCTS * np.abs(value)
    return np.broadcast_to(bound, value.shape)


def _bound(
    compute: Callable[[np.ndarray], np.ndarray],
    rewards: np.ndarray,
    ids: np.ndarray,
    value: np.ndarray,
    *,
    unit: float,
    kl: np.ndarray,
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
    distance = np.abs(rewards - (np.bincount(ids, rewards) / np.maximum(sizes, 1))[ids])
    error = unit * (largest[ids] * (sizes[ids] + 2))
    spread = np.sqrt(np.bincount(ids, distance**2) / np.maximum(sizes, 1))[ids]
    gain = np.max(per_row / np.maximum(distance, 1e-30), where=distance > 4 * error, initial=0.0)
    # A group of equal rewards has advantages of 0.
    relative = np.where(spread > error, np.minimum(2 * error / np.maximum(spread, 1e-30), 1), 0)
    bound = error * max(gain, 1) + per_row * (relative + unit * (PRODUCTS + sizes[ids]))
    tied = (spread <= 2 * error) & ~_exact_means(rewards, ids, unit)
    if tied.any():
        bound = bound + _noise(compute, rewards, ids, value, np.where(tied, error, 0))
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


def _noise(
    compute: Callable[[np.ndarray], np.ndarray],
    rewards: np.ndarray,
    ids: np.ndarray,
    value: np.ndarray,
    error: np.ndarray,
) -> np.ndarray:
    """Returns how far errors of the rewards move the advantages of their groups, `[B]`; 0 in groups without one."""
    _, first = np.unique(ids, return_index=True)
    moved = rewards.copy()
    moved[first] += error[first]
    change = np.abs(compute(moved) - value)
    largest = np.zeros(int(ids.max()) + 1)
    np.maximum.at(largest, ids, change if change.ndim == 1 else change.max(1))
    # The moved reward keeps at least half of its error, as the mean of its group moves along.
    return np.where(error > 0, 2 * largest[ids], 0)
