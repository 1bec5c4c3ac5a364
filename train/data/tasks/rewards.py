"""Composition of the named rewards of a task into the scalar reward."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from train.config.data import Rewards
from train.config.errors import UserError, warn
from train.data.tasks.task import Example, Task

Scores = dict[str, np.ndarray]
RESERVED = (
    *("phase", "step", "loss", "entropy", "ppo_kl", "grad_norm", "skipped_updates", "updates_beyond_limit"),
    "updates_without_gradient",
    *("accuracy", "accuracy_greedy", "completion_length", "finished", "length_penalty", "overlong"),
    *("reward_std", "groups_with_spread", "repeated_completions", "copied_groups", "log_probs_missing"),
    *("learning_rate", "sampling_bias", "sampling_bias_z"),
    *("prompt", "completion", "answer", "conversation", "decoding"),
)
"""Names of metrics of the trainer, and of fields of its samples, which a reward would replace or be replaced by."""
RESERVED_PREFIXES = ("kl_", "rollout_", "mismatch_", "correction_", "packing_", "time/")


def judge(task: Task, examples: Sequence[Example], completions: Sequence[str], finished: np.ndarray) -> Scores:
    """Scores each completion with the verifier of the task: named rewards, each `[B]` float32, none if `B` is 0.

    Raises:
      UserError: two completions got different reward names.
    """

    def score_row(row: tuple[Example, str, bool]) -> dict[str, float]:
        return task.score(row[0], row[1], bool(row[2]))

    rows = list(zip(examples, completions, finished, strict=True))
    if task.workers > 1:
        with ThreadPoolExecutor(task.workers) as pool:
            scores = list(pool.map(score_row, rows))
    else:
        scores = [score_row(row) for row in rows]
    for score in scores:
        if score.keys() != scores[0].keys():
            first, other = (", ".join(sorted(names)) for names in (scores[0], score))
            raise UserError(f"task {task.name}: got rewards {first} for one completion and {other} for another")
    names = scores[0] if scores else ()
    return {name: np.asarray([score[name] for score in scores], np.float32) for name in names}


def overlong(lengths: np.ndarray, *, longest: int, buffer: int) -> np.ndarray:
    """Computes the soft overlong penalty, -1 to 0, of completions near the maximum length.

    `0` up to `longest - buffer`, then `((longest - buffer) - length) / buffer` down to `-1` at `longest` and after.

    Args:
      lengths: `[B]`, tokens per completion, including EOS.
      longest: length of the full penalty.
      buffer: number of tokens over which the penalty grows, at least 1.

    Returns:
      `[B]` float32.

    References:
      DAPO, arXiv:2503.14476, equation 13.

    Example:
        >>> overlong(np.array([6, 8, 9, 12]), longest=10, buffer=4).tolist()
        [0.0, -0.5, -0.75, -1.0]
    """
    over = np.asarray(lengths, np.float32) - (longest - buffer)
    return 0 - np.clip(over / buffer, 0, 1, dtype=np.float32)


def compose(config: Rewards, scores: Mapping[str, np.ndarray], lengths: np.ndarray, *, longest: int) -> Scores:
    """Adds the length penalties and the scalar "reward" to the named rewards of the task.

    `reward = sum of weight * score, or "reward" of the task without weights
              - length_penalty * length / longest + overlong_coef * overlong`

    Args:
      config: weights and penalties.
      scores: named rewards of the task, each `[B]`.
      lengths: `[B]`, tokens per completion, including EOS.
      longest: maximum completion length in tokens.

    Returns:
      All names of `scores`, "length_penalty" and "overlong" if enabled (as they enter the reward, at most 0), and
      "reward", each `[B]` float32.

    Raises:
      UserError: a reward has the name of a metric of the trainer, a weight names an unknown reward, there are no
        weights and the task returns no "reward", or a sum is not finite.
    """
    for name in scores:
        if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            raise UserError(f"rewards: got a reward named {name!r}, a name of the trainer; rename it")
    rewards = dict(scores)
    with np.errstate(over="ignore", invalid="ignore"):
        total = weighted(config.weights, rewards)
        if config.length_penalty:
            rewards["length_penalty"] = -np.float32(config.length_penalty) * np.asarray(lengths, np.float32) / longest
            total = total + rewards["length_penalty"]
        if config.overlong_buffer:
            punishment = overlong(lengths, longest=longest, buffer=config.overlong_buffer)
            rewards["overlong"] = np.float32(config.overlong_coef) * punishment
            total = total + rewards["overlong"]
    if not np.isfinite(total).all():
        raise UserError(f"rewards: got a sum of {total[~np.isfinite(total)][0]}, expected finite numbers of float32")
    return rewards | {"reward": total.astype(np.float32)}


def weighted(weights: Mapping[str, float] | None, scores: Mapping[str, np.ndarray]) -> np.ndarray:
    """Sums the weighted scores; without weights, returns the "reward" of the task.

    Raises:
      UserError: a weight names an unknown reward, or there are no weights and the task returns no "reward".
    """
    if weights is None:
        if "reward" not in scores:
            names = sorted(scores)
            example = ", ".join(f"{name}: 1" for name in names)
            raise UserError(
                f"rewards.weights: missing; the task has no total, only {', '.join(names)}; return the total as "
                f"'reward', or set rewards.weights={{{example}}}"
            )
        return np.asarray(scores["reward"], np.float32)
    check_names(weights, tuple(scores))
    zero = np.zeros(np.shape(next(iter(scores.values()))), np.float32)
    return sum((np.float32(weight) * scores[name] for name, weight in weights.items()), zero)


def warn_of_unweighted(weights: Mapping[str, float] | None, names: Sequence[str]) -> None:
    """Warns of the rewards of a function of the user that count nothing, because the weights do not name them."""
    missing = sorted(set(names) - set(names if weights is None else weights))
    if missing:
        every = [*(f"{name}: {weight:g}" for name, weight in (weights or {}).items()), *(f"{n}: ..." for n in missing)]
        subject = f"rewards {', '.join(missing)} have" if len(missing) > 1 else f"reward {missing[0]} has"
        warn(
            f"rewards.weights: {subject} no weight and {'count' if len(missing) > 1 else 'counts'} 0; set "
            f"rewards.weights={{{', '.join(every)}}}, or null for the function's own total, 'reward'"
        )


def check_names(weights: Mapping[str, float] | None, names: Sequence[str]) -> None:
    """Raises `UserError` if a weight names a reward that is not in `names`."""
    for name in weights or ():
        if name not in names:
            raise UserError(f"rewards.weights: got {name!r}, expected some of {', '.join(sorted(names))}")
