"""The check of the rows that come from the host, before they go to the devices."""

import dataclasses

import numpy as np
import pytest

from tests import tiny
from train.data.tasks import Task
from train.data.tasks.task import Example
from train.rollouts.collect import judge_drawn
from train.rollouts.source import Completions, SourceError
from train.run.routes import flips_by_lag

EXAMPLES = [Example("1+1=", "2", "2")] * 4


def completions_of(**changes) -> Completions:
    config = tiny.config_of("rollout.samples_per_prompt=2")
    shape = (4, tiny.PROMPT + config.data.max_completion_length)
    mask = np.zeros(shape, bool)
    mask[:, tiny.PROMPT] = True
    full = Completions(
        examples=EXAMPLES,
        tokens=np.full(shape, 7, np.int32),
        token_mask=mask,
        completion_mask=mask,
        fields={"log_probs": np.where(mask, -1.0, np.nan).astype(np.float32)},
        texts=["x"] * 4,
        finished=np.ones(4, bool),
    )
    return dataclasses.replace(full, **changes)


def collected(completions: Completions):
    config = tiny.config_of("rollout.samples_per_prompt=2")
    task = Task("fixed", EXAMPLES, EXAMPLES, lambda example, text, finished: {"reward": 1.0, "correct": 1.0})
    return tiny.rollout_of(tiny.context_of(config, task=task), completions)


def test_fitting_rows_are_accepted_with_any_masked_values() -> None:
    assert collected(completions_of()).metrics["reward"] == 1


@pytest.mark.parametrize(("lags", "lag"), [(None, None), ([2, 2, 2, 2], 2), ([0, 0, 1, 1], None)])
def test_rows_of_one_lag_name_the_flips(lags, lag) -> None:
    """Flips of rows with several lags have no name, and neither have those of a run without a lag."""
    rollout = collected(completions_of(lags=None if lags is None else np.array(lags, np.int32)))
    assert rollout.lag == lag
    flips = flips_by_lag({"routing_flips": 0.25}, rollout.lag)
    assert flips == ({} if lag is None else {"routing_flips_lag_2": 0.25})
    assert flips_by_lag({"reward": 1.0}, rollout.lag) == {}


def test_policy_lag_grows_from_zero_to_its_limit() -> None:
    context = tiny.context_of(tiny.config_of("rollout.samples_per_prompt=2", "rollout.policy_lag=2"))
    drawn = tiny.rollout_of(context, completions_of(rewards={"reward": np.ones(4, np.float32)}))
    assert [judge_drawn(context, drawn, step).lag for step in range(4)] == [0, 1, 2, 2]


@pytest.mark.parametrize("token", [-1, 10**6])
def test_tokens_outside_of_the_vocabulary_are_refused(token) -> None:
    tokens = completions_of().tokens.copy()
    tokens[1, 2] = token
    with pytest.raises(SourceError, match=r"rollout: the completions have 1 tokens outside of the vocabulary of \d+"):
        collected(completions_of(tokens=tokens))


def test_completion_containing_padding_is_refused() -> None:
    mask = completions_of().token_mask.copy()
    mask[2, tiny.PROMPT] = False
    with pytest.raises(SourceError, match="1 completion tokens that the token mask leaves out"):
        collected(completions_of(token_mask=mask))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_log_probs_are_refused(value) -> None:
    log_probs = completions_of().fields["log_probs"].copy()
    log_probs[3, tiny.PROMPT] = value
    with pytest.raises(SourceError, match="1 log_probs that are not finite"):
        collected(completions_of(fields={"log_probs": log_probs}))
