"""The main job of the project, `make train`, in a process of its own, as a user starts it."""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.harness.process import ROOT

RECIPES = {"quickstart": (), "smoke": ("steps=1", "warm_start.steps=1", "eval.prompts=4")}
SHOWN = 400
"""Characters of an error."""


class QuickstartContender:
    """Runs a recipe from its start to its end."""

    def versions(self) -> dict[str, str]:
        return {}

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Trains a recipe, and reads accuracies and seconds in the summary of its run."""
        with tempfile.TemporaryDirectory() as output:
            command = [sys.executable, "-m", "train", f"configs/{of}.yaml", f"output={output}", *RECIPES[of]]
            start = time.perf_counter()
            done = run(command)
            wall = time.perf_counter() - start
            if done.returncode:
                said = " ".join(done.stderr.split())[-SHOWN:]
                return [{"name": of, "problem": f"exit code {done.returncode}: {said}"}]
            (file,) = pathlib.Path(output).glob("*/summary.json")
            summary = json.loads(file.read_text())
        names = ("accuracy_before", "accuracy_after", "steps")
        return [{"name": of, "seconds": wall, **{name: summary.get(name) for name in names}}]


def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Runs a command in the checkout."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def load() -> QuickstartContender:
    """Returns the contender."""
    return QuickstartContender()
