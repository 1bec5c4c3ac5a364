"""Warnings about rollouts: which values call for them, and how often they come."""

import re

import pytest

from tests import tiny
from train.config.plan import Plan
from train.run.rollout_watch import RolloutWatch

FINE = {"groups_with_spread": 0.5, "repeated_completions": 0.1, "copied_groups": 0.0, "log_probs_missing": 0.0}
SERVER = "rollout.source={type: openai, url: 'http://host', model: m}"


def watch_of(*overrides: str) -> RolloutWatch:
    return RolloutWatch(Plan.of(tiny.config_of(*overrides)))


def biased(z: float, nats: float = -0.2) -> dict[str, float]:
    return FINE | {"sampling_bias": nats, "sampling_bias_z": z}


def test_steps_without_spread_warn_once_and_are_counted(capsys):
    watch = watch_of()
    for step in range(1, 61):
        watch.check(step, FINE | {"groups_with_spread": 0.5 if step == 2 else 0.0})
    lines = capsys.readouterr().err.splitlines()
    assert [re.match(r"warning: step (\d+): the rewards of no group differ, so that", line)[1] for line in lines] == [
        "1",
        "51",
    ]
    assert lines[0].endswith("or raise rollout.samples_per_prompt")
    assert lines[1].endswith("; so were 48 steps since the last such warning")


def test_copies_are_named_as_the_cause(capsys):
    watch_of().check(3, FINE | {"groups_with_spread": 0.0, "repeated_completions": 0.5})
    assert (
        "step 3: the rewards of no group differ, as all completions of a group are equal, so" in capsys.readouterr().err
    )
    watch_of().check(4, FINE | {"copied_groups": 0.25})
    assert (
        "step 4: in 25% of the groups all completions are equal, which is no chance; likely" in capsys.readouterr().err
    )


def test_advantages_without_groups_need_no_spread(capsys):
    for options in (("advantage.type=gae", "loss.value_coef=0.5"), ("loss.type=none", "kl.loss.coef=0.1")):
        watch_of(*options).check(1, FINE | {"groups_with_spread": 0.0})
    assert capsys.readouterr().err == ""


def test_missing_log_probs_warn(capsys):
    watch_of().check(1, FINE | {"log_probs_missing": 1 / 4096})
    assert "step 1: 0.02% of the sampled tokens have no log-prob of the sampler" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scores", "warned"),
    [
        ([50.0, 50.0], []),
        ([-4.0] * 3, [3]),
        ([-2.0] * 12, [10]),
        ([-1.5] * 50, []),
        ([9.0, *[0.0] * 20], []),
        ([5.0, -5.0] * 20, []),
        ([float("nan")] * 9, []),
        ([-30.0] * 60, [3, 53]),
    ],
)
def test_bias_is_summed_over_several_steps(scores, warned, capsys):
    """Takes 3 to 10 steps; a sum of independent z-scores has the root of their number as its standard deviation."""
    watch = watch_of()
    for step, score in enumerate(scores, start=1):
        watch.check(step, biased(score))
    assert [int(number) for number in re.findall(r"step (\d+): in the last", capsys.readouterr().err)] == warned


def test_bias_names_its_direction_and_causes(capsys):
    for overrides, nats, words in (
        (
            (),
            -0.21,
            ("0.21 nats less probable than draws of the policy, 17 standard", "a penalty, a bias or other weights\n"),
        ),
        ((SERVER,), 0.3, ("0.3 nats more probable", "a low temperature or other weights, in the server's defaults or")),
    ):
        watch = watch_of(*overrides)
        for step in range(3):
            watch.check(step, biased(10.0 if nats > 0 else -10.0, nats))
        text = capsys.readouterr().err
        assert all(word in text for word in words), text
