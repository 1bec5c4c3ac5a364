"""Copies in groups that chance does not explain, and tokens without a log-prob: some are counted, many end a run."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

from tests import tiny
from train.rl.objective import coefficients
from train.rl.preparation import make_preparation
from train.rl.step import make_update
from train.rollouts.row_statistics import LEAST_CHANCE, check_rows
from train.rollouts.source import Completions, SourceError

SAMPLES, GROUPS = 4, 2


def completions_of(rows: list[list[int]], log_probs: list[list[float]] | None, **fields) -> Completions:
    """Completions of these ids, with their log-probs."""
    shape = (len(rows), tiny.PROMPT + tiny.NEW_TOKENS)
    tokens, mask, values = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for index, ids in enumerate(rows):
        columns = slice(tiny.PROMPT, tiny.PROMPT + len(ids))
        tokens[index, columns], mask[index, columns] = ids, True
        if log_probs is not None:
            values[index, columns] = log_probs[index]
    return Completions(
        examples=tiny.context_of(tiny.config_of()).prompts.batch(0)[:1] * len(rows),
        tokens=tokens,
        token_mask=mask | (np.arange(shape[1]) < tiny.PROMPT),
        completion_mask=mask,
        texts=["1"] * len(rows),
        finished=np.ones(len(rows), bool),
        fields={"rollout_log_probs": values, **fields} if log_probs is not None else {},
        rewards={"reward": np.arange(len(rows), dtype=np.float32)},
    )


def judged(rows: list[list[int]], log_probs: list[list[float]] | None, *options: str, episodes=None, **fields):
    """Metrics of a rollout of two groups of four."""
    config = tiny.config_of("rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", *options)
    completions = completions_of(rows, log_probs, **fields)
    return tiny.rollout_of(tiny.context_of(config), dataclasses.replace(completions, episode_rows=episodes))


FIRST, SECOND = [[1, 2, 3]] * 4, [[4, 5]] * 4
UNLIKELY = [[-2.0] * 3] * 4 + [[-2.0] * 2] * 4


@pytest.mark.parametrize("options", [(), ("rollout.top_p=0.9",)])
def test_copies_in_all_groups_end_the_run(options):
    """By chance: after the first row of a group the other three have exp(-6) and exp(-4)."""
    with pytest.raises(SourceError) as caught:
        judged(FIRST + SECOND, UNLIKELY, *options)
    assert str(caught.value).startswith(
        "rollout: in each of the 2 groups of the step all 4 completions are equal, by chance with a probability of 1e-1"
    )
    for word in ("one seed", "cache", "watermark", "greedy"):
        assert word in str(caught.value)


def test_copies_of_a_recording_may_be_wanted(tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    source = f"rollout.source={{type: file, path: {tmp_path / 'rows.jsonl'}}}"
    with pytest.raises(SourceError, match=r"set rollout\.samples_per_prompt=1 if rows are to be equal$"):
        judged(FIRST + SECOND, UNLIKELY, source)


def test_likely_or_unknown_copies_are_counted():
    """Answers of one token that are nearly certain, cuts that log-probs do not contain, and no log-probs at all."""
    answers, likely = [[7]] * 4 + [[8]] * 4, [[-0.1]] * 8
    for metrics in (
        judged(answers, likely).completions.metrics,
        judged(FIRST + SECOND, UNLIKELY, "rollout.top_k=3").completions.metrics,
        judged(FIRST + SECOND, UNLIKELY, "rollout.min_p=0.1").completions.metrics,
        judged(FIRST + SECOND, None).completions.metrics,
        judged(FIRST + SECOND, UNLIKELY, "rollout.record_log_probs=false").completions.metrics,
        judged([[]] * 8, [[]] * 8).completions.metrics,
    ):
        assert (metrics["repeated_completions"], metrics["copied_groups"]) == (0.75, 0)


def test_log_probs_over_kept_tokens_contain_the_cut():
    kept_ids = np.zeros((8, tiny.PROMPT + tiny.NEW_TOKENS, 1), np.int32)
    with pytest.raises(SourceError, match="all 4 completions are equal"):
        judged(FIRST + SECOND, UNLIKELY, "rollout.top_k=3", "rollout.record_kept_tokens=true", kept_ids=kept_ids)


def test_copies_of_one_group_are_a_share():
    metrics = judged([*FIRST, [1], [1], [2], [3]], [[-4.0] * 3] * 4 + [[-1.0]] * 4).completions.metrics
    # Three of the first group and one of the second have an equal one before them.
    assert (metrics["repeated_completions"], metrics["copied_groups"]) == (0.5, 0.5)
    # The same ids in another order, or one more of them, are another completion.
    metrics = judged(
        [[1, 2], [2, 1], [1], [1, 2, 3]] * 2, [[-1.0] * 2, [-1.0] * 2, [-1.0], [-1.0] * 3] * 2
    ).completions.metrics
    assert metrics["repeated_completions"] == 0


def test_rows_without_an_episode_are_no_completions():
    """Three copies and a fork that is empty; two completions, each with its fork, and a failure."""
    episodes = np.array([0, 1, 2, -1, 4, 4, 6, -1], np.int32)
    unlikely = [[-9.0] * 3] * 3 + [[]] + [[-9.0], [], [-9.0], []]
    copies, others = [[1, 2, 3]] * 3 + [[]], [[1], [], [2], []]
    metrics = judged(copies + others, unlikely, episodes=episodes).completions.metrics
    assert (metrics["repeated_completions"], metrics["copied_groups"]) == (pytest.approx(0.4), 0.5)
    with pytest.raises(SourceError, match="completions are equal"):
        judged([*copies, [1], [], [1], []], unlikely, episodes=episodes)
    alone = np.array([0, -1, -1, -1, 4, -1, -1, -1], np.int32)
    assert judged(copies + others, unlikely, episodes=alone).completions.metrics["copied_groups"] == 0


def test_single_completions_are_no_groups():
    config = tiny.config_of(
        "rollout.prompts_per_step=8", "rollout.samples_per_prompt=1", "advantage.type=reinforce_plus_plus"
    )
    metrics = tiny.rollout_of(tiny.context_of(config), completions_of(FIRST + SECOND, UNLIKELY)).completions.metrics
    assert not {"repeated_completions", "copied_groups"} & metrics.keys()


@pytest.mark.parametrize("probabilities", [[0.5, 0.3, 0.2], [0.999, 0.001], [1.0], [0.25] * 4])
def test_false_alarms_are_rarer_than_the_chance(probabilities):
    """All pairs of groups of two, enumerated: copies that are as unlikely as c come up less often than c."""
    samples, groups, p = 2, 2, np.array(probabilities)
    for least in (1e-1, 1e-2, 1e-4, 1e-6):
        alarms = 0.0
        for copies in itertools.product(range(len(p)), repeat=groups):
            if np.prod(p[list(copies)] ** (samples - 1)) < least:
                alarms += np.prod(p[list(copies)] ** samples)
        assert alarms <= least


def test_many_missing_log_probs_end_the_run():
    config = tiny.config_of("rollout.prompts_per_step=2", "rollout.samples_per_prompt=4")
    lengths = np.full(8, 50)

    def check(missing: int) -> float:
        statistics = {"ids": np.arange(8, dtype=np.uint64), "most_log_prob": np.zeros(8), "missing": np.zeros(8, int)}
        statistics["missing"][0] = missing
        return check_rows(config, statistics, lengths, np.ones(len(lengths), bool))["log_probs_missing"]

    assert [check(missing) for missing in (0, 1, 4)] == [0, 1 / 400, 4 / 400]
    with pytest.raises(
        SourceError, match=r"rollout: 5 of the 400 sampled tokens have no log-prob .*expected at most 1%"
    ):
        check(5)


@pytest.mark.parametrize("floor", [-math.inf, -9999.0, -100.0, -3e38])
def test_one_floor_is_left_out_of_the_loss(floor):
    """Its mask has a hole, its log-prob a number, and its text and length stay as they are."""
    rows, log_probs = [[number, number + 1] for number in range(8)], [[-1.0, -2.0]] * 7 + [[-1.0, floor]]
    rollout = judged(rows, log_probs)
    mask = np.asarray(rollout.batch.completion_mask)
    assert mask.sum() == 15
    assert not mask[7, tiny.PROMPT + 1]
    assert bool(rollout.batch.token_mask[7, tiny.PROMPT + 1])
    assert float(rollout.batch.rollout_log_probs[7, tiny.PROMPT + 1]) == 0
    metrics = rollout.completions.metrics
    assert (metrics["completion_length"], metrics["log_probs_missing"]) == (2, 1 / 16)
    unused = judged(rows, log_probs, "rollout.record_log_probs=false")
    assert np.asarray(unused.batch.completion_mask).sum() == 16


def test_floors_do_not_enter_an_update():
    """Loss, gradient and metrics are those of a batch whose mask has the hole from the start."""
    options = ("kl.rollout.coef=0.1", "loss.old_log_probs=sampler", "correction=[]", "optim.max_grad_norm=1e9")
    config = tiny.config_of("rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", *options)
    context = tiny.context_of(config)
    optimizer = tiny.keep_gradient()
    update = make_update(context.plan, context.model, optimizer, tiny.state_of(config, optimizer), context.mesh)
    prepare, rows = jax.jit(make_preparation(context.plan)), [[number, number + 1] for number in range(8)]

    def gradient(floor: float) -> tuple[float, list[np.ndarray]]:
        rollout = judged(rows, [[-1.0, -2.0]] * 7 + [[-1.0, floor]], *options)
        batch, _, _ = prepare(rollout.batch, {})
        state, metrics = update(tiny.state_of(config, optimizer), None, batch, np.arange(8), coefficients(config))
        assert math.isfinite(float(metrics["rollout_kl"].value()))
        return float(metrics["loss"].value()), jax.tree.leaves(jax.device_get(state.opt_state))

    loss, gradients = gradient(-9999.0)
    other_loss, others = gradient(-math.inf)
    assert loss == other_loss
    jax.tree.map(np.testing.assert_array_equal, gradients, others)
    assert abs(loss) < 10


def test_least_chance_is_one_in_a_trillion_steps():
    assert math.exp(LEAST_CHANCE) == pytest.approx(1e-12)
