"""The inputs of the generated cases: a few batches, drawn in float64 from a fixed seed.

Each has `[6, 12]` arrays under this project's names. They differ in the mask (`base`: padding on the right; `holes`:
holes too; `empty_row`: a row without a token) and in how far the policies are apart (`huge`: log-ratios of tokens far
outside every clip; `far_rows`: mean log-ratios of rows; `far_sampler`: log-ratios to the sampler alone). Rewards are
multiples of 1/64, exact in float32, so that a cast of the rewards alone changes nothing.
"""

import dataclasses

import numpy as np

ROWS, LENGTH, VOCABULARY, OBJECTIVES = 6, 12, 7, 2


@dataclasses.dataclass(frozen=True)
class Kind:
    """A batch: its seed, tokens per row, share of holes, distance of the policies and groups of its rows."""

    seed: int
    lengths: tuple[int, ...]
    holes: float
    distance: float
    groups: tuple[int, ...]


BATCHES = {
    "base": Kind(31, (12, 12, 5, 9, 2, 7), 0.0, 0.25, (0, 0, 1, 1, 2, 2)),
    "holes": Kind(12, (12, 8, 11, 6, 9, 4), 0.3, 0.6, (0, 0, 0, 1, 1, 2)),
    "empty_row": Kind(13, (10, 7, 0, 12, 3, 6), 0.0, 0.3, (0, 0, 1, 1, 2, 2)),
    "huge": Kind(14, (12, 9, 12, 10, 11, 12), 0.0, 0.4, (0, 0, 1, 1, 2, 2)),
    "far_rows": Kind(15, (12, 9, 12, 10, 11, 12), 0.0, 0.4, (0, 0, 1, 1, 2, 2)),
    "far_sampler": Kind(16, (12, 9, 12, 10, 11, 12), 0.0, 0.4, (0, 0, 1, 1, 2, 2)),
}
# Distance of the other policies in the rows of "far_rows"; 12 is beyond the cap at 10 of a row's mean log-ratio.
FAR_ROWS = (12.0, -12.0, 0.0, 0.0, 0.0, 0.0)
# Log-ratios of a few tokens of "huge"; the k3 of the first overflows a clip at 10, the last those at 20.
FAR = (-3.0, -12.0, -25.0, 4.0, 14.0, 30.0)


def _sixty_fourths(values: np.ndarray) -> np.ndarray:
    return np.round(values * 64) / 64


def _masked_tokens(kind: Kind, rng: np.random.Generator) -> np.ndarray:
    mask = np.arange(LENGTH) < np.array(kind.lengths)[:, None]
    holes = rng.random((ROWS, LENGTH)) < kind.holes
    holes[:, 0] = False
    return (mask & ~holes).astype(np.float64)


def _other_policy(log_probs: np.ndarray, distance: float, rng: np.random.Generator) -> np.ndarray:
    """Log-probs of a policy near this one, below 0; a few tokens agree exactly."""
    other = np.minimum(log_probs + distance * rng.standard_normal(log_probs.shape), -1e-3)
    return np.where(rng.random(log_probs.shape) < 0.05, log_probs, other)


def draw(name: str) -> dict[str, np.ndarray]:
    """Every array of a batch. New arrays go to the end: the draws before them stay as they are."""
    kind = BATCHES[name]
    rng = np.random.default_rng(kind.seed)
    shape = (ROWS, LENGTH)
    mask = _masked_tokens(kind, rng)
    log_probs = -np.abs(rng.standard_normal(shape)) * 1.2 - 0.02
    arrays = {
        "mask": mask,
        "log_probs": log_probs,
        "old_log_probs": _other_policy(log_probs, kind.distance, rng),
        "rollout_log_probs": _other_policy(log_probs, kind.distance, rng),
        "ref_log_probs": _other_policy(log_probs, 2 * kind.distance, rng),
        "teacher_log_probs": _other_policy(log_probs, 2 * kind.distance, rng),
        "advantages": rng.standard_normal(shape),
        "row_advantages": rng.standard_normal(ROWS),
        "cotangent": rng.standard_normal(shape),
        "old_values": rng.standard_normal(shape),
        "returns": rng.standard_normal(shape),
    }
    arrays["values"] = arrays["old_values"] + 0.4 * rng.standard_normal(shape)
    arrays["rewards"] = _sixty_fourths(np.abs(rng.standard_normal(ROWS)) + 0.1)
    arrays["rewards"][1] = 0.0
    arrays["baselines"] = _sixty_fourths(rng.standard_normal(ROWS))
    arrays["reward_components"] = _sixty_fourths(rng.standard_normal((ROWS, OBJECTIVES)))
    # A reward function that does not apply gives NaN; the last row has no reward at all.
    arrays["partial_components"] = arrays["reward_components"].copy()
    arrays["partial_components"][[2, 5, 5], [0, 0, 1]] = np.nan
    arrays["token_rewards"] = _sixty_fourths(rng.standard_normal(shape)) * mask
    last = np.where(mask.any(1), LENGTH - 1 - mask[:, ::-1].argmax(1), 0)
    arrays["outcome_rewards"] = np.zeros(shape)
    arrays["outcome_rewards"][np.arange(ROWS), last] = arrays["rewards"] * mask.any(1)
    arrays["sum_squared_probs"] = np.exp(log_probs) ** 2 + 0.1 * rng.random(shape) * (1 - np.exp(log_probs)) ** 2
    arrays["entropies"] = -log_probs * (0.5 + rng.random(shape))
    arrays["necs"] = rng.standard_normal(shape)
    arrays["group_ids"] = np.array(kind.groups)
    # Trajectories of two steps; three of them, of two prompts.
    arrays["prompt_ids"], arrays["run_ids"] = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 1, 1, 2, 2])
    arrays["state_ids"] = np.array([0, 1, 0, 1, 0, 2])
    arrays["is_weights"] = np.exp(0.3 * rng.standard_normal(shape))
    arrays["logits"] = 2 * rng.standard_normal((*shape, VOCABULARY))
    arrays["teacher_logits"] = arrays["logits"] + rng.standard_normal((*shape, VOCABULARY))
    arrays["expert"] = np.array([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    if name in ("huge", "far_sampler"):
        far, where = np.repeat(FAR, 2), rng.permutation(np.flatnonzero(mask))[: 2 * len(FAR)]
        near = {"huge": ["log_probs"], "far_sampler": ["log_probs", "old_log_probs", "ref_log_probs"]}[name]
        for key in ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs"):
            arrays[key].flat[where] = (np.minimum(far, 0) if key in near else -np.maximum(far, 0)) - 0.5
    if name == "far_rows":
        shift = np.array(FAR_ROWS)[:, None]
        arrays["log_probs"] = arrays["log_probs"] + np.minimum(shift, 0)
        for key in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
            arrays[key] = arrays[key] - np.maximum(shift, 0)
    arrays["kl"] = arrays["old_log_probs"] - arrays["ref_log_probs"]
    return arrays


def updates() -> dict[str, np.ndarray]:
    """Inputs of an adaptive controller: KLs around, far above and far below its target, and numbers of samples."""
    rng = np.random.default_rng(21)
    kl = np.concatenate([0.1 * np.exp(rng.standard_normal(18)), [0.0, -0.05, 3.0, 0.1]])
    return {"kls": kl, "num_samples": rng.integers(1, 513, kl.shape).astype(np.float64)}
