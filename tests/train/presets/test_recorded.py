"""The presets against the systems: the loss and the weight gradients of a whole optimizer step, as each computed them.

The recordings are those of `tests/goldens/presets`: a Qwen 2 of transformers, one batch, float64.
"""

import pytest

from tests.train.presets import proof
from train.config.presets import preset_names

pytestmark = pytest.mark.one_jax
TOLERANCE = {"float64": 1e-7, "float32": 1e-5}


def check(found):
    """The differences are rounding."""
    assert found.gradient < TOLERANCE[found.dtype]
    assert found.loss < TOLERANCE[found.dtype]


def test_every_preset_is_recorded():
    assert set(preset_names()) <= set(proof.recorded_presets())


@pytest.mark.parametrize("name", preset_names())
def test_preset_equals_its_system(name):
    # In two parts, which give what the system computed in one.
    (comparison,) = proof.prove(name, micro_batches=(2,))
    check(comparison)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name != "trl/grpo")) for name in preset_names()]
)
def test_preset_equals_its_system_without_micro_batches(name):
    (comparison,) = proof.prove(name)
    check(comparison)


@pytest.mark.thorough
def test_compiled_update_equals_the_system():
    for comparison in proof.prove("trl/grpo", proof.compiled_update, (1, 2)):
        check(comparison)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("trl/grpo", {"kl.loss.importance_corrected": False}),
        ("verl/gspo", {"loss.empty_rows": "drop"}),
        ("skyrl/grpo", {"kl.loss.aggregation": None, "kl.loss.empty_rows": "drop"}),
        ("openrlhf/reinforce++", {"advantage.whiten_ddof": 1}),
        ("art/cispo", {"advantage.scale_by_mean": False}),
        ("prime-rl/grpo", {"advantage.empty_rows": "count"}),
        ("prime-rl/max_rl", {"advantage.zeros": "count"}),
        ("slime/grpo_tis", {"correction": []}),
        ("slime/gspo", {"loss.gradient": "token", "loss.empty_rows": "drop"}),
        ("tunix/dr_grpo", {"loss.empty_rows": "count"}),
        ("tunix/ppo", {"temperature": 0.8}),
    ],
)
def test_another_setting_gives_another_result(name, change, monkeypatch):
    monkeypatch.setitem(proof.CHANGES, name, {**proof.CHANGES.get(name, {}), **change})
    (comparison,) = proof.prove(name)
    assert comparison.gradient > 1e-4
