"""Commands without a model, without arguments or with a wrong name say what to do next."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from kljax.__main__ import main as library
from tests.integration.command import ROOT
from train import eval as evaluation
from train.__main__ import main
from train.config.download import DOWNLOAD, OFFLINE, hub_program
from train.config.fields import known_fields
from train.config.installation import python_command
from train.config.load import load
from train.config.usual_names import USUAL_NAMES

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
PRETRAINED = [path for path in CONFIGS if DOWNLOAD.search(path.read_text())]


@pytest.mark.parametrize("path", PRETRAINED, ids=lambda path: path.stem)
def test_recipe_without_its_model_names_the_download(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([str(path), "mesh={}", "rollout.mesh=null"]) == 2
    error = capsys.readouterr().err
    commands = re.findall(r"download it: \S*hf download (\S+) --local-dir (\S+)$", error, re.MULTILINE)
    assert commands, error
    assert set(commands) <= set(DOWNLOAD.findall(path.read_text()))


def test_missing_real_model_names_fetch_and_offline_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([str(ROOT / "configs/real.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"; fetch it: {python_command()} -m train.real --fetch\n")
    assert f"{python_command()} -m train {OFFLINE} needs none" in error
    assert load(ROOT / OFFLINE).config.model.path is None


def test_hub_name_as_model_is_downloaded_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs/gsm8k_qwen3_0_6b_lora.yaml")
    assert main([config, "model.path=Org/Some-Model"]) == 2
    error = capsys.readouterr().err
    expected = (
        f"{hub_program()} download Org/Some-Model --local-dir checkpoints/Some-Model, and set the field to checkpoints"
    )
    assert expected in error
    assert main([config, "model.path=checkpoints/other"]) == 2
    assert "download" not in capsys.readouterr().err


def test_train_without_arguments_lists_configs(capsys):
    assert main([]) == 2
    out, text = capsys.readouterr()
    assert out == ""
    for path in CONFIGS:
        assert f"configs/{path.name} " in text


def test_library_without_arguments_lists_commands(capsys):
    assert library([]) == 2
    text = capsys.readouterr().err
    assert all(name in text for name in ("systems", "audit", "parity"))


def test_help_with_a_word_searches(capsys):
    assert main(["--help", "kl.loss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("  kl.loss.")
    assert any(line.startswith("  kl.loss.estimator: ") for line in lines)
    assert len(lines) < 100
    assert main(["--help", "Dual_Clip"]) == 0
    assert "dual_clip" in capsys.readouterr().out
    assert main(["--help", "nonsense"]) == 0
    assert "no field or algorithm has nonsense" in capsys.readouterr().out


def test_evaluation_of_no_run_lists_runs(tmp_path, capsys):
    (tmp_path / "first").mkdir()
    (tmp_path / "first/config.yaml").write_text("steps: 1\n")
    assert evaluation.main([str(tmp_path / "nope")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'nope'}: no such run or config" in error
    assert f"there are {tmp_path / 'first'}" in error


@pytest.mark.parametrize(
    ("program", "active", "expected"),
    [
        ("/clone/.venv/bin/python", None, ".venv/bin/python"),
        ("/clone/.venv/bin/python", "/clone/.venv/bin/python", "python"),
        ("/envs/new one/bin/python", "/usr/bin/python", "'/envs/new one/bin/python'"),
        ("/envs/new/bin/python", "/envs/new/bin/python", "python"),
        ("/envs/new/bin/python", None, "/envs/new/bin/python"),
    ],
)
def test_interpreter_is_shown_as_the_shell_finds_it(program, active, expected, monkeypatch):
    monkeypatch.setattr(sys, "executable", program)
    monkeypatch.setattr(Path, "cwd", lambda: Path("/clone"))
    monkeypatch.setattr(shutil, "which", lambda name: active)
    assert python_command() == expected


def test_shown_commands_start_this_interpreter(capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/envs/new/bin/python")
    main([])
    text = capsys.readouterr().err
    lines = text[text.index("next:") :].splitlines()[1:]
    assert len(lines) == 3
    assert all(line.startswith("  /envs/new/bin/python -m train ") for line in lines)


@pytest.mark.parametrize(
    ("name", "field"),
    [("lr", "optim.learning_rate"), ("beta", "kl.loss.coef"), ("num-generations", "rollout.samples_per_prompt")],
)
def test_usual_name_of_a_field_is_translated(name, field, capsys):
    quickstart = str(ROOT / "configs/quickstart.yaml")
    assert main([quickstart, f"{name}=0.1"]) == 2
    assert capsys.readouterr().err.endswith(f"; did you mean '{field}'?\n")
    for flag in ([f"--{name}", "0.1"], [f"--{name}=0.1"]):
        with pytest.raises(SystemExit) as ended:
            main([quickstart, *flag])
        assert ended.value.code == 2
        assert capsys.readouterr().err.endswith(f"; a field is set without dashes: {field}=0.1\n")


def test_evaluation_without_arguments_asks_for_one(capsys):
    with pytest.raises(SystemExit):
        evaluation.main([])
    assert capsys.readouterr().err.endswith("are required: RUN_OR_CONFIG\n")


def test_usual_names_are_not_fields_themselves():
    assert set(USUAL_NAMES.values()) <= set(known_fields())
    assert not set(USUAL_NAMES) & set(known_fields())
