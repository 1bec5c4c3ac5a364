"""The command line: exit codes, plain messages, and no JAX before the config is known to be good."""

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import kljax
from train.__main__ import main
from train.config.errors import UserError
from train.config.help import FAMILIES

ROOT = Path(__file__).parents[3]

# Exits 99 if JAX was imported on the way.
NO_JAX = (
    "import sys; from train.__main__ import main; c = main(sys.argv[1:]); sys.exit(99 if 'jax' in sys.modules else c)"
)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("steps: 3\n")
    return path


@pytest.fixture
def fake_run(monkeypatch):
    """Replaces the trainer; returns the list of its calls, and the action to take."""
    calls, module = [], types.ModuleType("train.run.run")

    def run(loaded, *, resume):
        calls.append((loaded, resume))
        return module.action()

    module.run, module.action = run, lambda: 0
    monkeypatch.setitem(sys.modules, "train.run.run", module)
    return calls, module


def python(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_bad_config_exits_with_2_before_jax_loads(config):
    done = python("-c", NO_JAX, config, "kl.loss.estimator=k4", "foo")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"error: {config}: 2 problems",
        "  'foo': got no '=', expected an override of the form key=value",
        "  kl.loss.estimator: got 'k4', expected one of none, k1, abs, k2, k3, low_var_kl, exact; did you mean 'k3'?",
    ]


def test_missing_file_through_the_real_command(tmp_path):
    done = python("-m", "train", tmp_path / "none.yaml")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {tmp_path / 'none.yaml'}: 1 problem",
        "  no file or recipe of this name",
    ]


def test_config_package_imports_neither_jax_nor_the_library():
    done = python("-c", "import sys, train.config; sys.exit('jax' in sys.modules or 'kljax' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_run_gets_the_config_and_the_flag(config, fake_run):
    calls, _ = fake_run
    assert main([str(config), "seed=7", "--resume", "optim.optimizer.b1=5e-1"]) == 0
    ((loaded, resume),) = calls
    assert (loaded.config.seed, loaded.config.optim.optimizer.b1, loaded.config.steps) == (7, 0.5, 3)
    assert loaded.source == config
    assert resume is True


def test_exit_code_of_the_run_is_passed_on(config, fake_run):
    calls, module = fake_run
    module.action = lambda: 7
    assert main([str(config)]) == 7
    assert calls[0][1] is False


def test_warnings_are_printed_once(config, fake_run, capsys):
    assert main([str(config), "kl.rollout.coef=0.1", "rollout.record_log_probs=false"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "note: rollout.record_log_probs: switched on, because kl.rollout.coef > 0 needs the sampler's log-probs"
    ]


def raising(error):
    def action():
        raise error

    return action


def test_user_error_of_the_run_is_a_message(config, fake_run, capsys):
    fake_run[1].action = raising(UserError("rollout_log_probs: missing"))
    assert main([str(config)]) == 2
    assert capsys.readouterr().err == "error: rollout_log_probs: missing\n"


def test_other_errors_are_not_hidden(config, fake_run):
    fake_run[1].action = raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main([str(config)])


def test_interrupt_ends_with_130(config, fake_run, capsys):
    fake_run[1].action = raising(KeyboardInterrupt())
    assert main([str(config)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("arguments", [["config.yaml", "--resum"], ["config.yaml", "--other"]])
def test_wrong_usage_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m train" in capsys.readouterr().err


def test_help_lists_the_fields(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "  kl.loss.estimator: 'k3'\n" in text
    assert "  steps: required\n" in text
    assert "--resume" in text


def test_help_lists_every_algorithm_with_its_fields(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    fields, _, listed = text.partition("\nalgorithms (")
    assert "  loss.type: 'ppo'\n" in fields
    assert "  kl.loss.controller.schedule.type: 'linear'\n" in fields
    assert "loss.clip_high" not in fields  # it has a default of its own in every loss
    for table in FAMILIES.values():
        for name, target in table.items():
            assert f"\n  {name}: {target.replace(':', '.')}. " in listed
    assert "\n      clip_high: 4.0. The upper bound of the weight is `1 + clip_high`, at least 0. Exp" in listed


def test_the_command_shows_the_version():
    done = python("-m", "train", "--version")
    assert (done.returncode, done.stdout) == (0, f"kljax {kljax.__version__}\n")


@pytest.mark.parametrize("command", ["train.eval", "train.export"])
def test_the_other_commands_show_the_version(command, capsys):
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(command).main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kljax {kljax.__version__}\n"
