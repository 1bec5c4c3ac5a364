"""Presets: what lies over what, what is said about it, and the errors."""

from pathlib import Path

import pytest

from kljax import aggregation, kl
from train.__main__ import main
from train.config.errors import ConfigError
from train.config.explain import ESTIMATORS, GRADIENTS, REDUCTIONS, explain
from train.config.load import dump_yaml, load, parse
from train.config.presets import DIRECTORY, leaves, preset_names, read_preset
from train.config.yaml_text import parse_yaml

DOCS = Path(__file__).parents[3] / "docs" / "presets.md"


def write(folder, text):
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_alone_with_its_fields(name):
    config, warnings = parse({"steps": 1, "preset": name})
    assert not warnings
    for path, value in leaves(read_preset(name)):
        actual = config
        for part in path.split("."):
            actual = getattr(actual, part)
        if isinstance(value, list):
            actual = [entry.model_dump(include=set(arguments)) for entry, arguments in zip(actual, value, strict=True)]
        assert actual == value, path


@pytest.mark.parametrize("name", preset_names())
def test_config_with_a_preset_round_trips(name):
    config, _ = parse({"steps": 1, "preset": name})
    raw, _ = parse_yaml(dump_yaml(config))
    assert parse(raw)[0] == config


def test_defaults_precede_preset_file_and_command_line(tmp_path):
    path = write(tmp_path, "steps: 1\npreset: verl/grpo\nloss:\n  clip_high: 0.3\n")
    loaded = load(path, ["loss.clip_low=0.1"])
    loss = loaded.config.loss
    assert (loss.clip_high, loss.clip_low, loss.dual_clip, loss.max_ratio) == (0.3, 0.1, 3.0, None)
    assert loaded.origins["loss.clip_high"] == "file"
    assert loaded.origins["loss.clip_low"] == "command line"
    assert loaded.origins["loss.dual_clip"] == "preset verl/grpo"
    assert "loss.max_ratio" not in loaded.origins


def test_overridden_preset_fields_are_named():
    _, warnings = parse({"steps": 1, "preset": "trl/dapo", "loss": {"clip_high": 0.3}})
    assert warnings == ("preset: trl/dapo, but with loss.clip_high 0.3",)


def test_replaced_loss_inherits_the_reduction_without_clips():
    loss = parse({"steps": 1, "preset": "trl/grpo", "loss": "sapo"})[0].loss
    assert (loss.type, loss.aggregation, loss.empty_rows) == ("sapo", "seq_mean_token_mean", "count")


def test_preset_length_is_the_length_of_the_config():
    raw = {"steps": 1, "preset": "trl/dr_grpo", "data": {"max_completion_length": 12}}
    assert parse(raw)[0].loss.max_length == 12
    assert parse({**raw, "loss": {"max_length": 9}})[0].loss.max_length == 9
    kl = {"loss": {"aggregation": "seq_mean_token_sum_norm"}}
    assert parse({"steps": 1, "kl": kl, "data": {"max_completion_length": 12}})[0].loss.max_length == 12


def test_unknown_preset_is_named_with_known_presets():
    with pytest.raises(ConfigError) as raised:
        parse({"steps": 1, "preset": "trl/gpro"})
    (line,) = raised.value.problems
    assert line.startswith("preset: got 'trl/gpro', expected one of ")
    assert all(name in line for name in preset_names())
    assert line.endswith("; did you mean 'trl/grpo'?") or "did you mean 'trl/" in line


def test_algorithm_is_explained_with_origins_of_fields(tmp_path, capsys):
    path = write(tmp_path, "steps: 1\npreset: trl/grpo\nkl:\n  loss:\n    coef: 0.04\n")
    assert main([str(path), "loss.clip_high=0.3", "--explain"]) == 0
    text = capsys.readouterr().out
    for line in (
        "advantages: grpo",
        "  loss.clip_high = 0.3 (command line)",
        "  loss.clip_low = 0.2 (preset trl/grpo)",
        "  kl.loss.coef = 0.04 (file)",
        "  loss.dual_clip = null (default)",
        "reduction: mean over the rows of the mean of their tokens",
    ):
        assert line in text.splitlines()
    assert "`L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`" in text
    assert "+ coef * importance ratio * k3 = exp(-x) - 1 + x, differentiated itself" in text


def test_corrections_are_explained(tmp_path):
    path = write(tmp_path, "steps: 1\npreset: verl/grpo\ncorrection:\n  type: truncated_importance_weights\n")
    lines = explain(load(path)).splitlines()
    assert "correction for the sampler: truncated_importance_weights (file)" in lines
    assert "  level token, max_weight 2.0" in [line.replace("'", "") for line in lines]


def test_entropy_controller_is_explained(tmp_path):
    controller = "{type: adaptive, target: 0.5, delta: 0.01}"
    path = write(tmp_path, f"steps: 1\nloss: {{entropy_controller: {controller}}}\n")
    lines = explain(load(path)).splitlines()
    assert "in the loss: - entropy_coef * entropy" in lines
    assert "  loss.entropy_controller.target = 0.5 (file)" in lines
    path = write(tmp_path, "steps: 1\n")
    assert "entropy_coef" not in explain(load(path))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_explained(name, tmp_path):
    path = write(tmp_path, f"steps: 1\npreset: {name}\n")
    assert f"(preset {name})" in explain(load(path))


def test_every_name_has_an_explanation():
    assert set(REDUCTIONS) == set(aggregation.MODES)
    assert set(ESTIMATORS) == {*kl.ESTIMATORS, "exact"}
    assert set(GRADIENTS) == set(kl.GRADIENTS)


def test_the_page_lists_every_preset():
    text = DOCS.read_text()
    assert [name for name in preset_names() if f"`{name}`" not in text] == []
    assert sorted(path.stem for path in DIRECTORY.rglob("*.yaml")) == sorted(n.split("/")[1] for n in preset_names())


CONFIG = """
steps: 1
advantage: {type: rloo}
loss: {type: ppo, aggregation: token_sum}
kl:
  loss: {coef: 0.02, estimator: k1, gradient: k2}
  rollout: {coef: 0.01}
correction: {type: truncated_importance_weights}
"""


@pytest.mark.parametrize("name", preset_names())
def test_preset_of_the_command_replaces_its_sections(name, tmp_path):
    loaded = load(write(tmp_path, CONFIG), [f"preset={name}"])
    alone, _ = parse({"steps": 1, "preset": name, "rollout": loaded.config.rollout.model_dump()})
    for section in ("advantage", "loss", "kl", "correction"):
        assert getattr(loaded.config, section) == getattr(alone, section), section
    assert loaded.warnings[0].startswith(f"preset: {name} replaces advantage, loss, kl, correction of ")


def test_fields_beside_a_preset_are_noted(tmp_path, capsys):
    path = write(tmp_path, CONFIG)
    assert main([str(path), "preset=trl/dapo", "kl.loss.coef=0.04", "loss.clip_high=0.2", "--explain"]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert f"note: preset: trl/dapo replaces advantage, loss, kl, correction of {path}" in notes
    assert "note: preset: trl/dapo, but with kl.loss.coef 0.04" in notes
    assert not any(line.startswith("warning: preset") for line in notes)


def test_fields_of_a_file_beside_presets_noted(tmp_path):
    notes = load(write(tmp_path, f"{CONFIG}preset: trl/dapo\n")).warnings
    assert notes[0] == (
        "preset: trl/dapo, but with advantage.type rloo, loss.aggregation token_sum, kl.loss.coef 0.02, "
        "kl.loss.estimator k1, kl.loss.gradient k2, kl.rollout.coef 0.01, correction truncated_importance_weights"
    )


def test_null_preset_keeps_the_file(tmp_path):
    loaded = load(write(tmp_path, CONFIG), ["preset=null"])
    assert (loaded.config.advantage.type, loaded.config.kl.loss.coef) == ("rloo", 0.02)


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("trl/") and name != "trl/rloo"])
def test_trl_preset_has_the_kl_of_beta(name):
    """k3 times the ratio of the policy loss, differentiated; off, as `beta` is. RLOO has it in the reward."""
    config, _ = parse({"steps": 1, "preset": name})
    term, level = config.kl.loss, "geometric" if config.loss.type == "gspo" else "token"
    assert (term.estimator, term.gradient, term.importance_corrected, term.coef) == ("k3", "value", True, 0)
    assert term.importance_level == level
    assert term.aggregation is None
