"""Every reduction of the PyTorch systems as arguments of `token_weights`, against their formulas written as loops.

The formulas run over micro-batches, as the systems do, with what they count over the whole step counted beforehand.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax

# Rows of all lengths, one without a token, holes; prompts and rollouts need not be adjacent.
MASK = np.array(
    [
        [1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [0, 0, 0, 0, 1],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 1],
    ],
    bool,
)
VALUES = np.random.default_rng(0).normal(size=MASK.shape)
ROWS, LENGTH = MASK.shape
TOKENS, PER_ROW = MASK.sum(), MASK.sum(1)
PROMPT = np.array([0, 0, 1, 2, 1, 2])  # a prompt of SkyRL's
ROLLOUT = np.array([0, 1, 0, 2, 2, 3])  # several samples of one rollout, as slime has them
SPLITS = ([[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[5, 0, 3], [1], [2, 4]])
STEP_ROWS, STEP_TOKENS = 9, 40  # of a whole step of which these rows are a part

Formula = Callable[[np.ndarray, list[int]], float]


def sums(values: np.ndarray, rows: list[int]) -> list[float]:
    return [float(values[i][MASK[i]].sum()) for i in rows]


def per_row(divisors: np.ndarray, factor: float = 1.0) -> Formula:
    """The sum of each row over its divisor, at least 1, added up and scaled."""
    return lambda v, rows: factor * sum(s / max(divisors[i], 1) for s, i in zip(sums(v, rows), rows, strict=True))


def total(divisor: float) -> Formula:
    return lambda v, rows: sum(sums(v, rows)) / divisor


def of_group(ids: np.ndarray) -> np.ndarray:
    """For each entry, the tokens of all rows with its id."""
    return np.array([PER_ROW[ids == i].sum() for i in ids])


COUNT = {"empty_rows": "count"}
NORM = {"mode": "seq_mean_token_sum_norm"}
SYSTEMS: dict[str, tuple[dict[str, object], Formula]] = {
    "verl token-mean over a whole step": ({"mode": "token_mean", "denominator": STEP_TOKENS}, total(STEP_TOKENS)),
    "verl seq-mean-token-sum": ({"mode": "seq_mean_token_sum"}, total(5)),
    "verl seq-mean-token-sum over a whole step": (
        {"mode": "seq_mean_token_sum", "denominator": STEP_ROWS},
        total(STEP_ROWS),
    ),
    "verl seq-mean-token-mean over a whole step": (
        {"mode": "seq_mean_token_mean", "denominator": STEP_ROWS},
        per_row(PER_ROW, 1 / STEP_ROWS),
    ),
    "verl seq-mean-token-sum-norm 0.9.1": ({**NORM, "max_length": 100.0}, total(5 * 100.0)),
    "verl seq-mean-token-sum-norm before": ({**NORM, "max_length": LENGTH, "denominator": 1}, total(LENGTH)),
    "verl token-sum": ({"mode": "token_sum"}, total(1.0)),
    "trinity token-mean": ({"mode": "token_mean", "denominator": TOKENS + 1e-8}, total(TOKENS + 1e-8)),
    "trinity seq-mean-token-sum": ({"mode": "seq_mean_token_sum", **COUNT}, total(ROWS)),
    "trinity seq-mean-token-sum-norm": (
        {**NORM, "max_length": LENGTH + 1e-8, "denominator": 1},
        total(LENGTH + 1e-8),
    ),
    "skyrl token_mean": ({"mode": "token_mean"}, total(TOKENS)),
    "skyrl token_mean_legacy": (
        # Micro-batches of four rows: the remainder of two rows belongs to none, and weighs nothing.
        {"mode": "prompt_mean", "group_ids": np.arange(ROWS) // 4, "num_groups": ROWS // 4, "denominator": ROWS // 4},
        lambda v, rows: sum(s / PER_ROW[:4].sum() for s, i in zip(sums(v, rows), rows, strict=True) if i < 4),
    ),
    "skyrl sequence_mean": ({"mode": "seq_mean_token_mean", **COUNT}, per_row(PER_ROW, 1 / ROWS)),
    "skyrl seq_mean_token_sum_norm": ({**NORM, "max_length": 64, **COUNT}, total(ROWS * 64)),
    "skyrl prompt_mean": (
        {"mode": "prompt_mean", "group_ids": PROMPT, "num_groups": 3, **COUNT},
        per_row(of_group(PROMPT), 1 / 3),
    ),
    "slime mean over samples": (
        {"mode": "seq_mean_token_mean", "denominator": STEP_ROWS},
        per_row(PER_ROW, 1 / STEP_ROWS),
    ),
    "slime mean over rollouts": (
        {"mode": "prompt_mean", "group_ids": ROLLOUT, "num_groups": 4, "denominator": STEP_ROWS},
        per_row(of_group(ROLLOUT), 1 / STEP_ROWS),
    ),
    "slime per token": (
        {"mode": "token_mean", "denominator": np.maximum(PER_ROW, 1).sum()},
        total(np.maximum(PER_ROW, 1).sum()),
    ),
    "openrlhf token level": ({"mode": "token_mean", "denominator": STEP_TOKENS}, total(STEP_TOKENS)),
    "openrlhf sample level": (
        {"mode": "seq_mean_token_mean", "denominator": STEP_ROWS},
        per_row(PER_ROW, 1 / STEP_ROWS),
    ),
    "trl grpo, sapo": ({"mode": "seq_mean_token_mean", **COUNT}, per_row(PER_ROW, 1 / ROWS)),
    "trl bnpo": ({"mode": "token_mean"}, total(TOKENS)),
    "trl dr_grpo": ({**NORM, "max_length": 256, **COUNT}, total(ROWS * 256)),
    "trl dapo, cispo, vespo": ({"mode": "token_mean", "denominator": STEP_TOKENS}, total(STEP_TOKENS)),
    "trl luspo": ({"mode": "seq_mean_token_sum", **COUNT}, total(ROWS)),
    "prime-rl": ({"mode": "token_mean", "denominator": STEP_TOKENS}, total(STEP_TOKENS)),
    "art": ({"mode": "token_mean", "denominator": TOKENS + 1e-6}, total(TOKENS + 1e-6)),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_formula_of_the_system_with_any_micro_batches(name: str) -> None:
    arguments, formula = SYSTEMS[name]
    weights = kljax.token_weights(MASK, **arguments)
    for parts in SPLITS:
        expected = sum(formula(VALUES, rows) for rows in parts)
        actual = sum(float((VALUES[rows] * weights[np.array(rows)]).sum()) for rows in parts)
        np.testing.assert_allclose(actual, expected, 1e-12)
    value, grad = jax.value_and_grad(lambda v: kljax.aggregate(v, MASK, **arguments))(jnp.asarray(VALUES))
    np.testing.assert_allclose(value, formula(VALUES, list(range(ROWS))), 1e-12)
    chex.assert_trees_all_equal(grad, weights)


def test_step_count_equals_its_joined_parts() -> None:
    # The part of a step that one process holds, weighed with the number of rows of the step: the parts add up to it.
    for mode in ("seq_mean_token_sum", "seq_mean_token_mean"):
        full = kljax.token_weights(MASK, mode=mode)
        parts = [kljax.token_weights(MASK[rows], mode=mode, denominator=5) for rows in (slice(0, 2), slice(2, None))]
        np.testing.assert_allclose(np.concatenate(parts), full, 1e-14)
