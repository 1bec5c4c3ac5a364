"""The check of the rows that come from the host, before they go to the devices."""

import dataclasses

import numpy as np
import pytest

from tests import tiny
from train.data.tasks import Task
from train.data.tasks.task import Example
from train.rollouts.source import Completions, SourceError
from train.run.routes import flips_by_lag
from train.sequences.token_fields import VERSIONS

EXAMPLES = [Example("1+1=", "2", "2")] * 4


def completions_of(**changes) -> Completions:
    config = tiny.config_of("rollout.samples_per_prompt=2")
    shape = (4, tiny.PROMPT + config.data.max_completion_length)
    mask = np.zeros(shape, bool)
    mask[:, : tiny.PROMPT + 1] = True
    completion_mask = mask & (np.arange(shape[1]) >= tiny.PROMPT)
    full = Completions(
        examples=EXAMPLES,
        tokens=np.full(shape, 7, np.int32),
        token_mask=mask,
        completion_mask=completion_mask,
        fields={"rollout_log_probs": np.where(completion_mask, -1.0, np.nan).astype(np.float32)},
        texts=["x"] * 4,
        finished=np.ones(4, bool),
    )
    return dataclasses.replace(full, **changes)


def collected(completions: Completions, *options: str, step: int = 0):
    config = tiny.config_of("rollout.samples_per_prompt=2", *options)
    task = Task("fixed", EXAMPLES, EXAMPLES, lambda example, text, finished: {"reward": 1.0, "correct": 1.0})
    return tiny.rollout_of(tiny.context_of(config, task=task), completions, step)


def test_fitting_rows_are_accepted_with_any_masked_values() -> None:
    assert collected(completions_of()).completions.metrics["reward"] == 1


def versions_of(*rows: int) -> dict:
    """The fields of four rows with these versions."""
    fields = dict(completions_of().fields)
    mask = completions_of().completion_mask
    return {**fields, VERSIONS: np.where(mask, np.array(rows)[:, None], -1).astype(np.int32)}


@pytest.mark.parametrize(("versions", "lag"), [(None, None), ([3, 3, 3, 3], 2), ([5, 5, 4, 4], None)])
def test_rows_of_one_lag_name_the_flips(versions, lag) -> None:
    """Flips of rows with several lags have no name, and neither have those of a run without a lag."""
    rollout = collected(completions_of(**({} if versions is None else {"fields": versions_of(*versions)})), step=5)
    metrics = dict(rollout.completions.metrics)
    flips = flips_by_lag(metrics | {"routing_flips": 0.25})
    assert flips == ({} if lag is None else {f"routing_flips_lag_{lag}": 0.25})
    assert flips_by_lag(metrics) == {}


def test_lags_are_measured_over_tokens() -> None:
    """Tokens of unknown versions, and of versions that this run has not made, count in no metric."""
    shape = completions_of().tokens.shape
    mask = np.zeros(shape, bool)
    mask[:, tiny.PROMPT : tiny.PROMPT + 3] = True
    versions = np.full(shape, -1, np.int32)
    versions[0, tiny.PROMPT : tiny.PROMPT + 3] = 5, 4, 2
    versions[1, tiny.PROMPT] = 9
    fields = {"rollout_log_probs": np.where(mask, -1.0, 0).astype(np.float32), VERSIONS: versions}
    in_prompt = np.arange(shape[1]) < tiny.PROMPT
    rollout = collected(completions_of(token_mask=mask | in_prompt, completion_mask=mask, fields=fields), step=5)
    assert rollout.completions.metrics["rollout_lag"] == (0 + 1 + 3) / 3
    assert rollout.completions.metrics["rollout_lag_max"] == 3
    assert flips_by_lag({**rollout.completions.metrics, "routing_flips": 0.25}) == {}


@pytest.mark.parametrize("option", ["rollout.policy_lag=2", "rollout.policy_lag=0"])
def test_lags_of_zero_are_measured_if_there_may_be_others(option) -> None:
    metrics = collected(completions_of(fields=versions_of(1, 1, 1, 1)), option, step=1).completions.metrics
    assert ("rollout_lag" in metrics) == (option == "rollout.policy_lag=2")


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
    log_probs = completions_of().fields["rollout_log_probs"].copy()
    log_probs[3, tiny.PROMPT] = value
    with pytest.raises(SourceError, match="1 rollout_log_probs that are not finite"):
        collected(completions_of(fields={"rollout_log_probs": log_probs}))
