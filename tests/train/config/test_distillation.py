"""Configs without a policy loss, of either direction of the exact KL, and of references that move."""

import pytest

from tests.train.config.built import build, problems

DISTIL = ("loss.type=none", "kl.loss={coef: 1.0, estimator: exact}")


@pytest.mark.parametrize(
    "overrides",
    [
        DISTIL,
        (*DISTIL, "kl.loss.direction=forward"),
        (*DISTIL, "rollout.samples_per_prompt=1"),
        ("loss.type=none", "kl.loss={coef: 1.0, estimator: k1}"),
        ("reference={source: ema, decay: 0.0}",),
        ("reference={source: step, step: 0, refresh_every: 10}",),
        ("reference.refresh_every=3",),
    ],
)
def test_distillation_config_is_accepted(overrides):
    build(*overrides)


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (("loss.type=none",), "loss.type: got none, so that nothing is trained on; expected a policy loss"),
        ((*DISTIL, "kl.reward.coef=0.1"), "kl.reward.coef: got 0.1, which enters the loss by way of the advantages"),
        ((*DISTIL, "kl.advantage.coef=0.1"), "kl.advantage.coef: got 0.1, which enters the loss by way of the"),
        (
            (*DISTIL, "advantage.type=gae", "loss.value_coef=0.5"),
            "advantage.type: got gae, whose values and advantages loss.type none does not use",
        ),
        (
            ("kl.loss={coef: 0.1, estimator: k3, direction: forward}",),
            "kl.loss.direction: got forward, but kl.loss.estimator k3 is of drawn tokens",
        ),
    ],
)
def test_distillation_config_is_refused(overrides, start):
    (problem,) = problems(*overrides)
    assert problem.startswith(start)


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("reference={source: ema, decay: 1.0}", "reference.decay: got 1.0, expected a number >= 0 and < 1"),
        ("reference={source: ema, refresh_every: 2}", "reference.refresh_every: not a field when reference.source is"),
        ("reference={source: checkpoint, path: /, refresh_every: 2}", "reference.refresh_every: not a field when"),
        ("reference={source: base, refresh_every: 0}", "reference.refresh_every: got 0, expected an integer >= 1"),
        ("reference={source: mean}", "reference.source: got 'mean', expected one of base, step, adapter, checkpoint"),
    ],
)
def test_a_field_of_another_source_is_refused(override, start):
    (problem,) = problems(override)
    assert problem.startswith(start)
