"""The built wheel in empty environments, outside of the checkout; `make test-wheel` runs this, as it needs PyPI."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.command import ROOT

UV = Path(sys.executable).with_name("uv")
REWARDS = """
def count(record, completion, finished):
    return {"reward": completion.count("1") / 8, "correct": float("1" in completion)}
"""
SHADOW = "raise SystemExit('the folder of the user was imported')\n"


def run(*command: str | Path, cwd: Path, code: int = 0, environment: Mapping[str, str] | None = None) -> str:
    """Runs a command as a user would, outside of the environment of the tests; returns what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "UV_"))}
    # As in the tests, a program that runs once is compiled without optimizations.
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=kept | flags | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--wheel", "--quiet", "--out-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def environment(folder: Path, wheel: Path, extras: str) -> Path:
    """An environment with the wheel and nothing else, of the locked releases; returns its programs."""
    export = ("export", "--frozen", "--quiet", "--no-hashes", "--no-emit-project", "--no-default-groups")
    run(UV, *export, "--extra", "train", "--output-file", folder / "locked.txt", "--project", ROOT, cwd=folder)
    run(UV, "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    target = ("--python", folder / "venv/bin/python", "--constraint", folder / "locked.txt")
    run(UV, "pip", "install", "--quiet", *target, f"{wheel}{extras}", cwd=folder)
    return folder / "venv/bin"


def test_library_alone_needs_jax_and_numpy(wheel, tmp_path):
    programs = environment(tmp_path, wheel, "")
    code = "import kljax, sys; print(kljax.k3(-1.0, -1.0), 'train' in sys.modules)"
    assert run(programs / "python", "-c", code, cwd=tmp_path) == "0.0 False\n"
    packages = run(UV, "pip", "list", "--quiet", "--python", programs / "python", cwd=tmp_path)
    assert {line.split()[0] for line in packages.splitlines()[2:]} == {
        *("jax", "jaxlib", "kljax", "ml-dtypes", "numpy", "opt-einsum", "scipy"),
    }
    assert "k3" in run(programs / "kljax", "systems", "trl/k3", cwd=tmp_path)
    error = run(programs / "kljax-train", "smoke", cwd=tmp_path, code=2)
    assert error.startswith("kljax-train: needs the package ")
    assert error.endswith("; run: pip install 'kljax[train]'\n")


def test_trainer_runs_in_a_folder_with_such_names(wheel, tmp_path):
    programs = environment(tmp_path, wheel, "[train]")
    folder = tmp_path / "work"
    for path, text in {
        "train.py": SHADOW,
        "tests/__init__.py": SHADOW,
        "kljax_rewards.py": REWARDS,
        "prompts.jsonl": '{"prompt": "1", "solution": "1", "answer": "1"}\n' * 8,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)

    def command(*words: str, code: int = 0) -> str:
        # Many teams have their folder on the path.
        return run(programs / words[0], *words[1:], cwd=folder, code=code, environment={"PYTHONPATH": "."})

    listed = command("kljax-train", code=2)
    assert "  quickstart " in listed
    assert "kljax-train quickstart --explain" in listed
    assert "configs/" not in listed
    own = ["task=jsonl", "data.train=prompts.jsonl", "data.eval=prompts.jsonl", "rewards.workers=1"]
    # In a process of its own under the supervisor, with a worker process that imports the folder's module.
    shown = command("kljax-train", "smoke", *own, "data.reward=kljax_rewards:count")
    assert shown.startswith("devices: ")
    assert f"{programs.relative_to(tmp_path)}/kljax-report runs/smoke --open" in shown.replace("../", "")
    assert "accuracy" in command("kljax-eval", "runs/smoke")
    assert command("kljax-report", "runs/smoke") == "runs/smoke/report.html\n"
    command("kljax-export", "runs/smoke", "--to", "exported")
    assert (folder / "exported/model.safetensors").is_file()
    assert "trl/grpo" in command("kljax-train", "smoke", "preset=trl/grpo", "--explain")
    assert "usage: kljax-plan" in command("kljax-plan", "--help")
    assert "no file or recipe" in command("kljax-train", "quickstrat", code=2)
