"""The stage of the advantages: from rewards and groups, with a KL in the reward or in the advantage."""

import numpy as np

from kljax.parity.dump import DumpError
from kljax.parity.positions import over_tokens
from kljax.parity.recipe import Kl, Recipe, RecipeStep
from kljax.parity.replay import Prediction, Replay, run_call
from kljax.parity.rounding import PRODUCTS, accumulator, tree_height


def advantages(replay: Replay, recipe: Recipe) -> Prediction:
    """Recomputes the advantages from rewards and groups, with the KL of a term in the reward.

    Args:
      replay: the recorded arrays, among them `rewards` and `group_ids`.

    Returns:
      A `Prediction`, `[B, T]`, or `[B]` if the advantages are recorded per row. It is compared at tokens in the
      recorded mask and in that of the recipe, or at rows with an unmasked token.

    Raises:
      DumpError: if advantages recorded per row are computed per token, and differ within a row.
    """
    step, unit = recipe.advantage or RecipeStep(), replay.unit("advantages", recipe)
    rewards, used = _shaped_rewards(replay, recipe), replay.used_mask(recipe)
    ids, count = _groups(replay.arrays["group_ids"], step.groups)
    call = replay.call("advantage", step)
    shaped = {"rewards": rewards, "group_ids": ids, "mask": used, "kl": np.zeros(used.shape)}
    renamed = {name: replay.array_name("advantage", name) for name in call.required}
    arrays = replay.inputs("advantage") | shaped
    arrays |= {name: shaped[field] for name, field in renamed.items() if field in shaped}
    # The KL is in the rewards already, so that the steps that subtract it subtract nothing.
    keywords = {"coef": 0.0} if any(then.function == "subtract_kl" for then in call.then) else {}
    keywords |= {} if "num_groups" in call.arguments else {"num_groups": count}
    value = step.sign * np.asarray(run_call("advantage", call, arrays, **keywords), np.float64)
    bound = _bound(rewards, ids, value, unit)
    mask: np.ndarray = replay.arrays["mask"]
    if "advantages" in replay.arrays and replay.arrays["advantages"].ndim == 1:
        rows = Prediction(value, bound, np.asarray(mask.any(1)))
        return rows if value.ndim == 1 else _of_rows(value, bound, np.asarray(mask & used))
    value, bound = (over_tokens(array, replay.shape) for array in (value, bound))
    return Prediction(value, bound, np.asarray(mask & used))


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


def _shaped_rewards(replay: Replay, recipe: Recipe) -> np.ndarray:
    kl = recipe.kl
    if kl is None or kl.place != "reward":
        return replay.arrays["rewards"]
    values = replay.input("kl", recipe)[0]
    return replay.arrays["rewards"] - kl.coef * np.where(replay.used_mask(recipe), values, 0).sum(1)


def _centered(replay: Replay, recipe: Recipe, value: np.ndarray, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Adds the mean KL of the batch less the KL of each token."""
    kl, used = recipe.kl or Kl(), replay.used_mask(recipe)
    values, errors = replay.input("kl", recipe)
    values, errors = np.where(used, values, 0), np.where(used, errors, 0)
    mean = values.sum() / (used.sum() + recipe.reduction.eps_batch)
    unit = replay.unit("token_loss", recipe)
    result = value + np.where(used, kl.coef * (mean - values), 0)
    height = accumulator(unit) * tree_height(int(used.sum())) + PRODUCTS * unit
    extra = abs(kl.coef) * (errors + errors.max() + height * np.abs(values).max())
    return result, bound + extra + unit * np.abs(result)


def _groups(group_ids: np.ndarray, which: str) -> tuple[np.ndarray, int]:
    _, ids = np.unique(group_ids, return_inverse=True)
    count = int(ids.max()) + 1
    if which == "interleaved":
        return np.arange(len(ids)) % count, count
    return (np.zeros_like(ids), 1) if which == "batch" else (ids, count)


def _bound(rewards: np.ndarray, ids: np.ndarray, value: np.ndarray, unit: float) -> np.ndarray:
    """Carries the rounding of the mean through a centred, scaled advantage.

    A distance to the mean of `n` rewards of at most `R` has an error of `u R (n + 2)`; the advantage multiplies it by
    its own ratio to the distance, and divides by a standard deviation whose relative error is at most twice the
    distance's error over it.
    """
    per_row = np.abs(value if value.ndim == 1 else np.abs(value).max(1))
    sizes = np.bincount(ids)
    largest = np.zeros(len(sizes))
    np.maximum.at(largest, ids, np.abs(rewards))
    distance = np.abs(rewards - (np.bincount(ids, rewards) / np.maximum(sizes, 1))[ids])
    error = unit * (largest[ids] * (sizes[ids] + 2))
    spread = np.sqrt(np.bincount(ids, distance**2) / np.maximum(sizes, 1))[ids]
    gain = np.max(per_row / np.maximum(distance, 1e-30), where=distance > 4 * error, initial=0.0)
    relative = np.minimum(2 * error / np.maximum(spread, 1e-30), 1)
    bound = error * max(gain, 1) + per_row * (relative + unit * (PRODUCTS + sizes[ids]))
    return bound if value.ndim == 1 else np.broadcast_to(bound[:, None], value.shape)
