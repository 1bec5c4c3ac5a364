"""Configs of other trainers as configs of this one: values, options without a field, files and the command line."""

import json
import pathlib

import pytest

from kljax.__main__ import main
from kljax.tools.systems.foreign import FOREIGN
from kljax.tools.systems.migration import as_yaml, flattened, translate
from train.config.fields import known_fields
from train.config.load import load
from train.config.usual_names import USUAL_NAMES

DEFAULTS = json.loads((pathlib.Path(__file__).parents[3] / "goldens/migration.json").read_text())
# Options whose default is not a value: TRL computes it, or a name of an example stands there.
NOT_COMPARED = {"steps_per_generation", "actor_rollout_ref.model.path", "trainer.experiment_name"}
LONG = {"trl": {"max_steps": 10}, "verl": {"trainer": {"total_training_steps": 10}}}


def config_of(folder: pathlib.Path, system: str, options: dict) -> object:
    """The loaded config of this trainer for some options of another one."""
    path = folder / "config.yaml"
    translation = translate(system, options)
    steps = [] if "steps" in translation.fields else ["steps: 10"]
    path.write_text("\n".join([*as_yaml(system, translation), "task: arithmetic", *steps]) + "\n")
    return load(path, ()).config


@pytest.mark.parametrize("system", DEFAULTS)
def test_defaults_are_those_of_the_release(system: str) -> None:
    recorded = DEFAULTS[system]["defaults"]
    compared = {option.name: option.default for option in FOREIGN[system].options if option.name not in NOT_COMPARED}
    compared |= {name: value for name, value in FOREIGN[system].read_by_others.items() if name in recorded}
    compared.pop("generation_batch_size", None)  # computed
    assert json.loads(json.dumps(compared)) == {name: recorded[name] for name in compared}


@pytest.mark.parametrize("system", FOREIGN)
def test_fields_of_options_exist(system: str) -> None:
    known = known_fields()
    assert {field for option in FOREIGN[system].options for field in option.fields if field not in known} == set()


@pytest.mark.parametrize("system", FOREIGN)
def test_hints_of_unknown_fields_agree_with_the_table(system: str) -> None:
    hints = {
        option: USUAL_NAMES.get(option.name.rpartition(".")[2]) for option in FOREIGN[system].options if option.fields
    }
    # A name of the table of systems stands for several fields, and a section for its own.
    named = {"loss.level": "loss.type", "advantage.scale": "advantage.type", "optim.schedule.type": "optim.schedule"}
    apart = [
        f"{option.name}: {hint}, {option.fields}"
        for option, hint in hints.items()
        if hint is not None and hint not in option.fields and named.get(hint) not in option.fields
    ]
    # `kl_coef` alone is that of the loss.
    assert [text for text in apart if not text.startswith("algorithm.kl_ctrl.kl_coef")] == []


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "luspo", "sapo", "vespo"])
def test_losses_of_trl_load(loss: str, tmp_path: pathlib.Path) -> None:
    options = {"loss_type": loss, "epsilon_high": 5.0 if loss == "cispo" else 0.28, "beta": 0.04, **LONG["trl"]}
    config = config_of(tmp_path, "trl", options)
    assert config.kl.loss.coef == 0.04
    assert config.kl.loss.importance_corrected
    if loss not in ("sapo", "vespo"):
        assert config.loss.clip_high == (4.0 if loss == "cispo" else 0.28)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_presets_of_trl_are_the_translated_config(loss: str, tmp_path: pathlib.Path) -> None:
    options = {"loss_type": "grpo" if loss == "gspo" else loss, "beta": 0.04, **LONG["trl"]}
    options |= (
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4} if loss == "gspo" else {}
    )
    options |= {"scale_rewards": "none"} if loss == "dr_grpo" else {}
    translated = config_of(tmp_path, "trl", options)
    preset = tmp_path / "preset.yaml"
    preset.write_text(f"preset: trl/{loss}\ntask: arithmetic\nsteps: 10\nkl: {{loss: {{coef: 0.04}}}}\n")
    expected = load(preset, ()).config
    for name in ("loss", "advantage", "kl"):
        actual, wanted = (getattr(config, name).model_dump() for config in (translated, expected))
        # The length of Dr. GRPO's divisor is that of the run.
        assert actual | {"max_length": None} == wanted | {"max_length": None}, name


def test_adaptive_entropy_and_vllm_correction_of_trl_load(tmp_path: pathlib.Path) -> None:
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 0.3, **LONG["trl"]}
    config = config_of(tmp_path, "trl", options)
    assert config.loss.entropy_controller.target == 0.3
    options = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", **LONG["trl"]}
    fields = translate("trl", options).fields
    assert fields["correction"]["type"] == "trl/token_truncate"


@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo", "reinforce_plus_plus"])
@pytest.mark.parametrize("loss", ["vanilla", "gspo", "cispo"])
def test_algorithms_of_verl_load(estimator: str, loss: str, tmp_path: pathlib.Path) -> None:
    actor = {
        "policy_loss": {"loss_mode": loss},
        "use_kl_loss": True,
        "ppo_mini_batch_size": 256,
        "optim": {"lr": "1e-6"},
    }
    options = {"algorithm": {"adv_estimator": estimator}, "actor_rollout_ref": {"actor": actor, "rollout": {"n": 4}}}
    config = config_of(tmp_path, "verl", {**options, **LONG["verl"], "data": {"train_batch_size": 512}})
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.2)
    assert (config.rollout.prompts_per_step, config.optim.updates_per_batch) == (512, 2)
    assert (config.optim.learning_rate, config.steps) == (1e-6, 10)


@pytest.mark.parametrize("loss", ["regular", "dual_clip", "gspo", "cispo", "sapo"])
def test_losses_of_skyrl_load(loss: str, tmp_path: pathlib.Path) -> None:
    config = config_of(tmp_path, "skyrl", {"trainer": {"algorithm": {"policy_loss_type": loss}}})
    assert (config.kl.loss.coef, config.kl.loss.aggregation) == (0.001, "seq_mean_token_mean")


@pytest.mark.parametrize("loss", ["default", "ipo"])
def test_losses_of_prime_rl_are_the_presets(loss: str, tmp_path: pathlib.Path) -> None:
    config = config_of(
        tmp_path, "prime-rl", {"trainer": {"loss": {"type": loss}}, "orchestrator": {"batch_size": 64, "group_size": 8}}
    )
    preset = tmp_path / "preset.yaml"
    preset.write_text(f"preset: prime-rl/{'grpo' if loss == 'default' else loss}\ntask: arithmetic\nsteps: 10\n")
    expected = load(preset, ()).config
    for name in ("loss", "advantage", "kl"):
        assert getattr(config, name) == getattr(expected, name)


def test_options_without_a_field_are_named() -> None:
    options = {"mask_truncated_completions": True, "top_entropy_quantile": 0.2, "entropy_coef": 0.02}
    options |= {
        "loss_type": "grpo",
        "gradient_accumulation_steps": 2,
        "new_option": 3,
        "logging_steps": 7,
        "max_steps": 5,
    }
    translation = translate("trl", options)
    assert [name for name, _, _ in translation.not_expressed] == [
        *("mask_truncated_completions", "top_entropy_quantile"),
    ]
    assert translation.fields["loss.entropy_aggregation"] == "token_mean"
    assert translation.unknown == ("new_option",)
    dapo = translate("trl", options | {"loss_type": "dapo"}).fields
    assert dapo["loss.entropy_coef"] == 0.02
    assert "loss.entropy_aggregation" not in dapo
    named = [name for name, _, _ in translate("trl", options | {"loss_type": "bnpo"}).not_expressed]
    assert named[0] == "gradient_accumulation_steps"


def test_texts_other_than_exponents_stay_texts() -> None:
    config = {"run": {"name": "2024", "note": "nan", "lr": "1e-6", "other": 3}}
    expected = [("run.name", "2024"), ("run.note", "nan"), ("run.lr", 1e-6), ("run.other", 3)]
    assert list(flattened(config, frozenset())) == expected


def test_command_prints_the_config(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"beta": 0.04, "top_entropy_quantile": 0.2, "max_steps": 3}))
    assert main(["systems", "--from", "trl", str(tmp_path / "config.json")]) == 0
    printed = capsys.readouterr().out
    assert "# not expressed: top_entropy_quantile: 0.2: " in printed
    assert "    coef: 0.04" in printed
    (tmp_path / "rl.toml").write_text('max_steps = 7\n[trainer.loss]\ntype = "ipo"\n[orchestrator]\nbatch_size = 8\n')
    assert main(["systems", "--from", "prime-rl", str(tmp_path / "rl.toml")]) == 0
    assert "steps: 7" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "tlr", "x.json"], "got 'tlr', expected one of trl, verl, skyrl, prime-rl; did you mean 'trl'?"),
        (["--from", "trl", "missing.json"], "No such file"),
        (["--from", "trl", "broken.json"], "expected JSON, or a file called .yaml or .toml"),
        (["--from", "trl", "list.json"], "got a list, expected a mapping of options"),
        (["--from", "verl", "broken.yaml"], "broken.yaml"),
        (["--from", "prime-rl", "broken.toml"], "expected rl.toml"),
        (["verl", "--from", "trl", "broken.json"], "give --from SYSTEM CONFIG alone"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"broken.json": "{", "list.json": "[]", "broken.yaml": "a: [", "broken.toml": "a = "}.items():
        pathlib.Path(name).write_text(text)
    assert main(["systems", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
