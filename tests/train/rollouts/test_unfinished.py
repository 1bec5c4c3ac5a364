"""`loss.unfinished: drop`: completions that a limit ended count in their groups, and are not trained on."""

import dataclasses

import jax
import numpy as np
import pytest

from tests import tiny
from tests.train.rollouts.test_user_source import right_rows
from train.config.errors import UserError
from train.rl.preparation import make_preparation
from train.rl.terms import make_token_weights
from train.rollouts.collect import collect
from train.rollouts.source import InTurn
from train.rollouts.stream import Stream


class Judged(InTurn):
    def sample(self, request):
        rows = right_rows(request)
        finished = np.array([True, False, True, True])
        return dataclasses.replace(rows, finished=finished, rewards={"reward": np.array([1.0, 0, 0, 0], np.float32)})


def batch_of(*options):
    config = tiny.config_of("rollout={prompts_per_step: 2, samples_per_prompt: 2}", "advantage.scale=none", *options)
    context = tiny.context_of(config)
    return context, collect(context, Stream(context, Judged()), 0).batch


def test_unfinished_completion_counts_in_its_group_alone():
    context, batch = batch_of("loss.unfinished=drop")
    trained = np.asarray(batch.completion_mask)
    np.testing.assert_array_equal(batch.kept_mask, trained & np.array([True, False, True, True])[:, None])
    with jax.set_mesh(context.mesh):
        prepared, _, _ = make_preparation(context.plan)(batch, {})
        weights = np.asarray(make_token_weights(context.plan)(prepared))
    assert np.unique(np.asarray(prepared.advantages)[0][trained[0]]).tolist() == [0.5]
    np.testing.assert_array_equal(weights > 0, batch.kept_mask)
    assert weights.sum() == pytest.approx(1)


def test_unfinished_completions_count_by_default():
    _, batch = batch_of()
    assert batch.kept_mask is None


def test_dropped_zeros_and_unfinished_completions_add_up():
    context, batch = batch_of("loss.unfinished=drop", "advantage.zeros=drop")
    with jax.set_mesh(context.mesh):
        prepared, _, _ = make_preparation(context.plan)(batch, {})
    assert np.asarray(prepared.kept_mask).any(1).tolist() == [True, False, False, False]


def test_denominators_have_one_rule():
    with pytest.raises(UserError, match=r"loss\.unfinished: got drop, which takes completions out of the denominators"):
        tiny.config_of("loss.unfinished=drop", "loss.rejected_tokens=count")
